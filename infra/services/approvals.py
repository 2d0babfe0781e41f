"""Flow runs that are paused until a person has decided."""

from infra.services import environment

environment.apply()

from prefect.client.orchestration import SyncPrefectClient  # noqa: E402  (Prefect reads its settings on import)
from prefect.client.schemas import filters  # noqa: E402
from prefect.client.schemas.objects import FlowRun, StateType  # noqa: E402


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
