"""What a flow run does, read from the Prefect server: state, log, and the task that runs now."""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from infra.services import durations, environment

environment.apply()

from prefect.client.orchestration import SyncPrefectClient  # noqa: E402  (Prefect reads its settings on import)
from prefect.client.schemas import filters  # noqa: E402
from prefect.client.schemas.objects import FlowRun, State, TaskRun  # noqa: E402
from prefect.client.schemas.sorting import LogSort  # noqa: E402

LATE_S = 10  # log lines and task states arrive in batches: look back this far for those that came late
LIMIT = 200  # what the server gives at once

# what Prefect itself logs around every run; the follower says it in its own words, and the UI keeps it
_BOILERPLATE = re.compile(
    r"Beginning (sub)?flow run|View at |Finished in state|Encountered exception during execution|Task run failed with|"
    r"Engine execution exited|Crash detected|Executing deployment step|Deployment step|All deployment steps|"
    r"Running \d+ deployment pull"
)
_LAST_WORDS = "Finished in state"  # of a flow run that ends by itself
_WORK = re.compile(r"prefect\.(flow|task)_runs$")  # loggers of the flow itself; the worker's have a longer name
_EXCEPTION = re.compile(r"(?:Flow|Task) run encountered an exception:? ?(?:(?P<kind>[\w.]+): )?(?P<text>.*)", re.S)
_TASK_SUFFIX = re.compile(r"-[0-9a-f]{3}$")


@dataclass
class Line:
    """One line of log. level: as in `logging`."""

    time: datetime
    level: int
    text: str


@dataclass
class Snapshot:
    """News since the last look.

    whole: the run has ended, and all that it logged and every task that logged has arrived.
    doing: what runs now, such as `rl: train policy: step (1/2)`, or the state's name while nothing does.
    task_started, usual_s: of the running task; None where there is none, or no earlier run to go by.
    """

    state: State
    whole: bool = False
    lines: list[Line] = field(default_factory=list)
    doing: str = ""
    task_started: datetime | None = None
    usual_s: float | None = None


class Follower:
    """Reads the run `flow_run_id` and the flows it calls."""

    def __init__(self, client: SyncPrefectClient, flow_run_id: UUID):
        self._client = client
        self._root = flow_run_id
        self._runs: dict[UUID, FlowRun] = {}
        self._seen: set[UUID] = set()
        self._names: dict[UUID, str] = {}  # of the flows
        self._logging: set[UUID] = set()  # tasks that have logged something
        self._said_last = False
        self._since = datetime.now(UTC) - timedelta(seconds=LATE_S)

    def look(self) -> Snapshot:
        """The state now and what was logged since the last look."""
        root = self._client.read_flow_run(self._root)
        self._runs[root.id] = root
        self._find_called()
        tasks = self._client.read_task_runs(
            task_run_filter=filters.TaskRunFilter(flow_run_id=filters.TaskRunFilterFlowRunId(any_=list(self._runs)))
        )
        lines = sorted([*self._logged(), *self._ended(tasks)], key=lambda line: line.time)
        ended = {task.id for task in tasks if task.state and task.state.is_final()}
        whole = root.state.is_final() and self._said_last and self._logging <= ended
        snapshot = Snapshot(state=root.state, whole=whole, lines=lines, doing=root.state.name.lower())
        running = [t for t in tasks if t.state and t.state.is_running() and not self._is_call(t)]
        if running:
            task = max(running, key=lambda t: t.start_time or t.created)
            name = task_name(task)
            flow = self._runs[task.flow_run_id]
            told = self._told(task)
            where = "" if flow.id == self._root else f"{self._name(flow)}: "
            snapshot.doing = f"{where}{name}" + (f": {told}" if told else "")
            snapshot.task_started = task.start_time
            snapshot.usual_s = durations.usual(name, _target(root))
        return snapshot

    def _find_called(self) -> None:
        parents = filters.FlowRunFilterParentFlowRunId(any_=list(self._runs))
        for run in self._client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(parent_flow_run_id=parents)):
            self._runs[run.id] = run

    def _logged(self) -> list[Line]:
        wanted = filters.LogFilter(
            flow_run_id=filters.LogFilterFlowRunId(any_=list(self._runs)),
            timestamp=filters.LogFilterTimestamp(after_=self._since - timedelta(seconds=LATE_S)),
            level=filters.LogFilterLevel(ge_=20),
        )
        new, offset, page = [], 0, None
        while page is None or len(page) == LIMIT:
            page = self._client.read_logs(wanted, limit=LIMIT, offset=offset, sort=LogSort.TIMESTAMP_ASC)
            new += [log for log in page if log.id not in self._seen]
            offset += LIMIT
        for log in new:
            self._seen.add(log.id)
            self._since = max(self._since, log.timestamp)
            if log.task_run_id:
                self._logging.add(log.task_run_id)
            elif log.flow_run_id == self._root and log.message.startswith(_LAST_WORDS):
                self._said_last = True
        return [
            Line(log.timestamp, log.level, log.message)
            for log in new
            if _WORK.match(log.name) and not _BOILERPLATE.match(log.message)
        ]

    def _ended(self, tasks: list[TaskRun]) -> list[Line]:
        lines = []
        for task in tasks:
            if task.id in self._seen or task.state is None or not task.state.is_final() or self._is_call(task):
                continue
            self._seen.add(task.id)
            seconds = task.total_run_time.total_seconds()
            took = "" if task.state.name == "Cached" else f" after {durations.words(seconds)}"
            level = 20 if task.state.is_completed() else 40
            lines.append(Line(task.state.timestamp, level, f"{task_name(task)}: {task.state.name.lower()}{took}"))
        return lines

    def _is_call(self, task: TaskRun) -> bool:
        """Whether this is the placeholder for a flow that another flow called."""
        return any(run.parent_task_run_id == task.id for run in self._runs.values())

    def _name(self, run: FlowRun) -> str:
        if run.flow_id not in self._names:
            self._names[run.flow_id] = self._client.read_flow(run.flow_id).name
        return self._names[run.flow_id]

    def _told(self, task: TaskRun) -> str:
        wanted = filters.ArtifactFilter(
            task_run_id=filters.ArtifactFilterTaskRunId(any_=[task.id]),
            type=filters.ArtifactFilterType(any_=["progress"]),
        )
        told = self._client.read_artifacts(artifact_filter=wanted, limit=1)
        return told[0].description or "" if told else ""


def _target(run: FlowRun) -> str:
    return run.parameters.get("config", {}).get("target", {}).get("name", "")


def task_name(task: TaskRun) -> str:
    """The task's name without the suffix that Prefect gives to each of its runs."""
    return _TASK_SUFFIX.sub("", task.name)


def cause(state: State) -> tuple[str, str]:
    """Class name ("" if none) and message of the exception that ended a run, on one line."""
    message = state.message or state.name
    match = _EXCEPTION.fullmatch(message)
    kind, text = (match["kind"] or "", match["text"]) if match else ("", message)
    return kind.rsplit(".", 1)[-1], " ".join(text.split())
