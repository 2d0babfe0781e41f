"""Runs whose process is gone do not stay RUNNING."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from infra.services import environment, runs

environment.apply()

from prefect.client.orchestration import SyncPrefectClient, get_client  # noqa: E402  (Prefect reads settings on import)
from prefect.client.schemas import filters  # noqa: E402
from prefect.exceptions import ObjectNotFound  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402
from prefect.states import Crashed  # noqa: E402

from infra.services.automations import RESUMED  # noqa: E402

MESSAGE = "its process is gone; running it again continues it"
RESUMES_PER_HOUR = 3  # by itself; what crashes again and again needs a person


class CrashesAgain(RuntimeError):
    """A run was continued by itself as often as it may be."""


def give_up() -> None:
    """Raises CrashesAgain when the flow run that this is called in was continued by itself too often: without an end,
    it would crash until somebody looks. Outside a flow run nothing happens."""
    if flow_run.id is None:
        return
    since = datetime.now(UTC) - timedelta(hours=1)
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(flow_run.id))
    times, scheduled = (
        0,
        False,
    )  # one crash can be reported, and answered, several times before the run is started again
    for state in sorted(states, key=lambda state: state.timestamp):
        scheduled |= state.message == RESUMED and state.timestamp > since
        if scheduled and state.is_running():
            times, scheduled = times + 1, False
    if times > RESUMES_PER_HOUR:
        raise CrashesAgain(
            f"it crashed {times} times within an hour and is not continued by itself any more: see its log for the "
            f"cause; the same command continues it"
        )


def settle() -> list[str]:
    """Mark the Prefect runs of every interrupted run of this machine as crashed, with the flows and tasks below them.
    The keys of the runs that were still shown as running are given."""
    settled = []
    with get_client(sync_client=True) as client:
        for run in runs.every():
            if run.status == "open" and run.flow_run_ids and not runs.live(run):
                marked = [_crash(client, UUID(flow_run_id)) for flow_run_id in run.flow_run_ids]
                if any(marked):
                    settled.append(run.key)
    return settled


def _crash(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    try:
        found = client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return False  # another server's, or deleted there
    below = filters.FlowRunFilter(parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
    for called in client.read_flow_runs(flow_run_filter=below):
        _crash(client, called.id)
    tasks = filters.TaskRunFilter(flow_run_id=filters.TaskRunFilterFlowRunId(any_=[flow_run_id]))
    for task in client.read_task_runs(task_run_filter=tasks):
        if task.state and not task.state.is_final():
            client.set_task_run_state(task.id, Crashed(message=MESSAGE), force=True)
    if found.state is None or found.state.is_final():
        return False
    client.set_flow_run_state(flow_run_id, Crashed(message=MESSAGE), force=True)
    return True
