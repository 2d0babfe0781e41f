"""Runs whose process is gone do not stay RUNNING, those whose process lives do not stay CRASHED, and those that a dead
worker had taken wait for the next one."""

import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx

from infra.services import environment, runs

environment.apply()

from prefect.client.orchestration import SyncPrefectClient, get_client  # noqa: E402  (Prefect reads settings on import)
from prefect.client.schemas import filters  # noqa: E402
from prefect.client.schemas.objects import State, StateType  # noqa: E402
from prefect.exceptions import Abort, ObjectNotFound  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402
from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: E402
from prefect.states import Crashed, Scheduled  # noqa: E402

from infra.services.automations import RESUMED  # noqa: E402
from infra.services.deployments import POOL  # noqa: E402
from infra.services.patience import patiently  # noqa: E402

MESSAGE = "its process is gone; running it again continues it"
RESUMES_PER_HOUR = 3  # by itself; what crashes again and again needs a person
LIVES = "its process lives: the report of a crash was late"
LOOK_EVERY_S = 2.0
STARTING = timedelta(minutes=5)  # a process that is about to run a flow has come that far by then


class CrashesAgain(RuntimeError):
    """A run was continued by itself as often as it may be."""


def give_up() -> None:
    """Raises CrashesAgain when the flow run that this is called in was continued by itself too often: without an end,
    it would crash until somebody looks. Outside a flow run nothing happens."""
    if flow_run.id is None:
        return
    since = datetime.now(UTC) - timedelta(hours=1)

    def been() -> list[State]:
        with get_client(sync_client=True) as client:
            return client.read_flow_run_states(UUID(flow_run.id))

    # one crash can be reported, and answered, several times before the run is started again
    times, scheduled = 0, False
    for state in sorted(patiently(been), key=lambda state: state.timestamp):
        scheduled |= state.message == RESUMED and state.timestamp > since
        if scheduled and state.is_running():
            times, scheduled = times + 1, False
    if times > RESUMES_PER_HOUR:
        raise CrashesAgain(
            f"it crashed {times} times within an hour and is not continued by itself any more: see its log for the "
            f"cause; the same command continues it"
        )


@contextlib.contextmanager
def denied() -> Iterator[None]:
    """Until the block ends, a report that the flow run it is in has crashed is taken back within `LOOK_EVERY_S`: the
    worker and the server report one crash several times, and a run that was continued since is not meant. Outside a
    flow run nothing happens."""
    if flow_run.id is None:
        yield
        return
    ended, mine = threading.Event(), UUID(flow_run.id)

    def look() -> None:
        with get_client(sync_client=True) as client:
            while not ended.wait(LOOK_EVERY_S):
                try:
                    state = client.read_flow_run(mine).state
                    if state and state.is_crashed():
                        _put_back(client, mine)
                except httpx.HTTPError:  # the server is away: asked again the next time
                    continue
                except ObjectNotFound:  # somebody deleted the run there
                    return

    watch = threading.Thread(target=look, name="crashes", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()  # before the run ends: what is put back must not come after that


def leave_to_the_other() -> None:
    """End this process, which was started for a flow run that another one still works on: what started it was told of a
    crash that was none, or was long over. The flow run stays as it was before that. Raises prefect's Abort."""
    with get_client(sync_client=True) as client:
        _put_back(client, UUID(flow_run.id))
    raise Abort(f"another process works on flow run {flow_run.id}")


def _put_back(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Give the run the state that it had before it was called crashed: running, or waiting for a person."""
    states = sorted(client.read_flow_run_states(flow_run_id), key=lambda state: state.timestamp)
    crashed = max((at for at, state in enumerate(states) if state.is_crashed()), default=len(states))
    before = next((s for s in reversed(states[:crashed]) if s.is_running() or s.is_paused()), None)
    if before is not None:
        same = State(type=before.type, name=before.name, message=LIVES, state_details=before.state_details)
        client.set_flow_run_state(flow_run_id, same, force=True)


def hand_back(worker: str) -> None:
    """Settle what the dead worker called `worker` had taken: a run that it had not begun waits again, unless another
    worker may have it; one that it had begun is marked crashed."""
    address = environment.variables()["PREFECT_API_URL"]  # it may have moved since Prefect was imported
    with temporary_settings({PREFECT_API_URL: address}):
        with get_client(sync_client=True) as client:
            others = {w.name for w in client.read_workers_for_work_pool(POOL) if w.status == "ONLINE"} - {worker}
            pool = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[POOL]))
            taken = filters.FlowRunFilterStateType(any_=[StateType.PENDING])
            taken = filters.FlowRunFilter(state=filters.FlowRunFilterState(type=taken))
            for run in [] if others else client.read_flow_runs(flow_run_filter=taken, work_pool_filter=pool):
                client.set_flow_run_state(run.id, Scheduled(message="its worker died"), force=True)
        settle()


def settle() -> list[str]:
    """Mark the Prefect runs of every interrupted run of this machine as crashed, with the flows and tasks below them;
    not those that are about to be continued. The keys of the runs that were still shown as running are given."""
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
    if found.state is None or found.state.is_final() or _about_to_go_on(found.state):
        return False
    client.set_flow_run_state(flow_run_id, Crashed(message=MESSAGE), force=True)
    return True


def _about_to_go_on(state: State) -> bool:
    """Whether a worker will start, or is starting, a process for the run."""
    return state.is_scheduled() or state.is_pending() and datetime.now(UTC) - state.timestamp < STARTING
