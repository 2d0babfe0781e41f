"""What Prefect remembers of how runs were started: by a schedule, by an automation, or by a person."""

from datetime import datetime
from typing import Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from infra.services import environment

Starter = Literal["schedule", "automation", "person"]
LIMIT = 200  # what the server gives at once


class Trigger(BaseModel):
    """An automation that starts flows. starts: their names."""

    model_config = ConfigDict(frozen=True)

    name: str
    enabled: bool
    starts: list[str]


class Started(BaseModel):
    """A flow run.

    target: name of the target it works on, "" where its parameters do not say. by: what started it; automation: its
    name, where it was one. state: such as `Completed`.
    """

    model_config = ConfigDict(frozen=True)

    flow: str
    run: str
    target: str
    by: Starter
    automation: str
    state: str
    ended: datetime | None
    url: str


def triggers() -> list[Trigger]:
    """The automations that start a flow. Without a Prefect server none."""
    if not _connected():
        return []
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = []
        for automation in client.read_automations():
            wanted = [action.deployment_id for action in automation.actions if action.type == "run-deployment"]
            starts = [client.read_deployment(one).name for one in wanted if one is not None]
            if starts:
                found.append(Trigger(name=automation.name, enabled=automation.enabled, starts=starts))
        return found


def triggered(since: datetime) -> list[Started]:
    """Runs that an automation started after `since`, newest first. Without a Prefect server none."""
    if not _connected():
        return []
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.sorting import FlowRunSort

    wanted = filters.FlowRunFilter(start_time=filters.FlowRunFilterStartTime(after_=since))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.START_TIME_DESC, limit=LIMIT)
        return [_started(client, run) for run in runs if _by(run) == "automation"]


def of(flow_run_id: str) -> Started | None:
    """How the flow run was started; None when the server does not know it."""
    if not _connected():
        return None
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            return _started(client, client.read_flow_run(UUID(flow_run_id)))
        except ObjectNotFound:
            return None


def _connected() -> bool:
    environment.apply()
    return "PREFECT_API_URL" in environment.variables()


def _by(run) -> Starter:
    if run.created_by is not None and run.created_by.type == "AUTOMATION":
        return "automation"
    return "schedule" if run.auto_scheduled else "person"


def _started(client, run) -> Started:
    page = str(client.api_url).removesuffix("/").removesuffix("/api")
    by = _by(run)
    return Started(
        flow=client.read_flow(run.flow_id).name,
        run=run.name,
        target=_target(run.parameters),
        by=by,
        automation=run.created_by.display_value if by == "automation" else "",
        state=run.state.name if run.state else "",
        ended=run.end_time,
        url=f"{page}/runs/flow-run/{run.id}",
    )


def _target(parameters: dict) -> str:
    label = parameters.get("target")
    if isinstance(label, str) and "/" in label:
        return label.rpartition("/")[0]
    config = parameters.get("config")
    return config.get("target", {}).get("name", "") if isinstance(config, dict) else ""
