"""Flow runs that are paused until a person has decided."""

import json
from collections.abc import Iterable
from uuid import UUID

from infra.services import environment

environment.apply()

from prefect.client.orchestration import SyncPrefectClient, get_client  # noqa: E402  (Prefect reads settings on import)
from prefect.client.schemas import filters  # noqa: E402
from prefect.client.schemas.objects import FlowRun, StateType  # noqa: E402

KEY = "approval-"  # how the pauses' keys begin


def waiting(client: SyncPrefectClient) -> list[FlowRun]:
    """The paused runs that wait for input."""
    paused = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[StateType.PAUSED]))
    )
    return [run for run in client.read_flow_runs(flow_run_filter=paused) if run.state.state_details.run_input_keyset]


def answer(client: SyncPrefectClient, run: FlowRun, word: dict[str, str]) -> str:
    """Give a paused run what it waits for, as the form on its page does. Gives why it was not taken, "" when it was."""
    done = client.resume_flow_run(run.id, run_input=word)
    return "" if done.status.value == "ACCEPT" else str(done.details.reason)


def given(flow_run_ids: Iterable[str]) -> dict[str, str] | None:
    """What somebody answered to one of these runs, or to a run that it called, while its process was gone; None when
    nobody did."""
    with get_client(sync_client=True) as client:
        ids = [UUID(flow_run_id) for flow_run_id in flow_run_ids]
        below = filters.FlowRunFilter(parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=ids))
        for flow_run_id in [*ids, *(run.id for run in client.read_flow_runs(flow_run_filter=below))]:
            for found in client.filter_flow_run_input(flow_run_id, f"paused-{KEY}", limit=200, exclude_keys=set()):
                if found.key.endswith("-response"):
                    return json.loads(found.value)
    return None
