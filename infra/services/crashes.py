"""Runs whose process is gone do not stay RUNNING."""

from uuid import UUID

from infra.services import environment, runs

environment.apply()

from prefect.client.orchestration import SyncPrefectClient, get_client  # noqa: E402  (Prefect reads settings on import)
from prefect.client.schemas import filters  # noqa: E402
from prefect.exceptions import ObjectNotFound  # noqa: E402
from prefect.states import Crashed  # noqa: E402

MESSAGE = "its process is gone; running it again continues it"


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
        flow_run = client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return False  # another server's, or deleted there
    below = filters.FlowRunFilter(parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
    for called in client.read_flow_runs(flow_run_filter=below):
        _crash(client, called.id)
    tasks = filters.TaskRunFilter(flow_run_id=filters.TaskRunFilterFlowRunId(any_=[flow_run_id]))
    for task in client.read_task_runs(task_run_filter=tasks):
        if task.state and not task.state.is_final():
            client.set_task_run_state(task.id, Crashed(message=MESSAGE), force=True)
    if flow_run.state is None or flow_run.state.is_final():
        return False
    client.set_flow_run_state(flow_run_id, Crashed(message=MESSAGE), force=True)
    return True
