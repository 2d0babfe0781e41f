"""MLflow runs: one for each phase of a run, found again after an interruption."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from infra.services.runs import Refused

if TYPE_CHECKING:
    import pandas as pd

RUN = "lockstep.run"
PHASE = "lockstep.phase"
PARENT = "mlflow.parentRunId"
OUTCOME = "lockstep.outcome"
MEASURED = "lockstep.measured"  # what a run of `lockstep measure` measured
NOTE, NOTE_LIMIT = "mlflow.note.content", 5000
BATCH = 1000  # MLflow's limit of metrics in one call


class Run:
    """An open MLflow run."""

    def __init__(self, client, uri: str, experiment: str, run_id: str):
        self._client = client
        self.id = run_id
        self.url = page(uri, experiment, run_id)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log numbers by name. NaN is left out: MLflow would show it as a value."""
        self._log([(name, float(value), step) for name, value in metrics.items()])

    def log_steps(self, steps: "pd.DataFrame") -> None:
        """Log a table with a column `step`: every other numeric column is a metric with one value a row."""
        numeric = steps.select_dtypes("number").columns.drop("step", errors="ignore")
        rows = zip(steps["step"], steps[numeric].to_dict("records"), strict=True)
        self._log([(name, float(value), int(step)) for step, row in rows for name, value in row.items()])

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log settings by dotted name. A value that an earlier attempt logged must not differ."""
        from mlflow.entities import Param

        items = [Param(key, str(value)) for key, value in params.items()]
        for at in range(0, len(items), 100):
            self._client.log_batch(self.id, params=items[at : at + 100])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags, such as `target_version`."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def describe(self, page: str) -> None:
        """Show a page (Markdown) as the run's description; MLflow keeps 5000 characters, so whole lines of as many."""
        whole = page if len(page) <= NOTE_LIMIT else page[:NOTE_LIMIT].rpartition("\n")[0]
        self.set_tags({NOTE: whole})

    def log_file(self, path: Path, folder: str = "") -> None:
        """Attach a file, or a folder's contents, under `folder`."""
        log = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
        log(self.id, str(path), folder or None)

    def _log(self, rows: list[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        items = [Metric(name, value, now, step) for name, value, step in rows if value == value]
        for at in range(0, len(items), BATCH):
            self._client.log_batch(self.id, metrics=items[at : at + BATCH])


def page(uri: str, experiment: str, run_id: str) -> str:
    """Address of the run's page, "" where MLflow is a file."""
    return f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}" if uri.startswith("http") else ""


@contextmanager
def open_run(
    client, uri: str, experiment: str, run_key: str, phase: str, parent: str | None, tags: Mapping[str, str]
) -> Iterator[Run]:
    """The MLflow run of (`run_key`, `phase`), new or reopened, which ends as the block does.

    parent: id of the run it is shown below; by default the oldest run of another phase of `run_key` that has none.
    """
    same = client.search_runs([experiment], f"tags.`{RUN}` = '{_quoted(run_key)}'", order_by=["start_time ASC"])
    found = [run for run in same if run.data.tags.get(PHASE) == phase]
    tops = [run for run in same if PARENT not in run.data.tags and run.data.tags.get(PHASE) != phase]
    if parent is None and tops and not (found and PARENT not in found[0].data.tags):
        parent = tops[0].info.run_id
    wanted = {RUN: run_key, PHASE: phase, **tags} | ({PARENT: parent} if parent else {})
    if found:
        run = Run(client, uri, experiment, found[0].info.run_id)
        client.update_run(run.id, status="RUNNING")
        run.set_tags(wanted)
    else:
        name = f"{phase} of {run_key}" if parent else run_key
        run = Run(client, uri, experiment, client.create_run(experiment, tags=wanted, run_name=name).info.run_id)
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    except Refused:
        status = "FINISHED"  # a refusal is a result
        run.set_tags({OUTCOME: "refused"})
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        client.set_terminated(run.id, status)


def newest_measured(client, experiment: str, what: str, model: str) -> str | None:
    """Id of the last run in which `what` was measured for the target `model`; None when there is none."""
    wanted = f"tags.`{MEASURED}` = '{_quoted(what)}' and tags.model = '{_quoted(model)}'"
    found = client.search_runs(
        [experiment], f"{wanted} and attributes.status = 'FINISHED'", order_by=["start_time DESC"], max_results=1
    )
    return found[0].info.run_id if found else None


def _quoted(text: str) -> str:
    if "'" in text or "\\" in text:
        raise ValueError(f"run key {text!r} must not contain quotes or backslashes")
    return text
