"""What is known of a release: its evidence, how its target was trained, and what Prefect remembers."""

import json
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from infra.config.review import ReviewConfig
from infra.lineage.lineage import Lineage
from infra.lineage.runs import newest_measured
from infra.lineage.versions import LineageError, Version, registered_model
from infra.services import history, runs
from infra.services.history import Started, Trigger
from infra.services.standing import Standing
from infra.store.base import Store
from tasks.evaluate import evidence
from tasks.report.measured import Measured, read


@dataclass(frozen=True)
class PastRun:
    """Training of one target version: its worst mismatch k3 in nats per token, and the steps past a bound."""

    label: str
    k3: float
    marked: int
    steps: int


@dataclass(frozen=True)
class Known:
    """All that the questions are answered from.

    versions: the release and its parts by kind. measured: evidence of all, the newest measurement last, and the step
    table of the target's training. transports: evidence of the last `lockstep measure transport` for the target, empty
    without one; transports_from: where it is. training, engine: the `rl` and `engine` sections it was trained with.
    past: trainings, oldest first. automated: whether `lockstep automate` is on for this target. triggers, triggered:
    automations that start flows, and runs that they started lately. loop: the last loop that ended, and how it was
    started.
    """

    versions: dict[str, Version]
    measured: Measured = field(default_factory=Measured)
    transports: pd.DataFrame = field(default_factory=lambda: evidence.concat([]))
    transports_from: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    past: list[PastRun] = field(default_factory=list)
    automated: bool = False
    triggers: list[Trigger] = field(default_factory=list)
    triggered: list[Started] = field(default_factory=list)
    loop: runs.Run | None = None
    started: Started | None = None

    @property
    def step_s(self) -> float:
        """Mean seconds of a step of the target's training."""
        return float(self.measured.steps["step_s"].mean())

    def row(self, figure: str, kind: str = "target") -> dict[str, Any] | None:
        """The last measurement of a figure of one part, over all domains if there is one; None without any."""
        rows = self.rows(figure, kind)
        overall = rows[rows["domain"].isin(["all", ""])]
        chosen = overall if len(overall) else rows
        return None if chosen.empty else chosen.iloc[-1].to_dict()

    def rows(self, figure: str, kind: str = "target") -> pd.DataFrame:
        """The last measurement of a figure of one part in each domain."""
        version = self.versions.get(kind)
        rows = self.measured.evidence
        found = rows[(rows["figure"] == figure) & (rows["subject"] == (version.subject if version else ""))]
        return found.drop_duplicates("domain", keep="last")

    def source(self, kind: str = "target") -> str:
        """Where figures about a part come from."""
        version = self.versions[kind]
        kept = ", ".join(ref.name for ref in version.evidence)
        run = f"MLflow run {version.run_id}, " if version.run_id else ""
        return f"{version.label}: {run}{kept or 'no evidence'}"


def gather(lineage: Lineage, store: Store, name: str, config: ReviewConfig) -> Known:
    """What is known of the release of target `name` that `config` means.

    Raises LineageError when there is none.
    """
    release = _release(lineage, name, config.release)
    parts = {kind: lineage.get(label) for kind, label in release.parts.items()}
    left_out = {
        kind: found[0]
        for kind, found in (("drafter", lineage.drafters(parts["target"])), ("quant", lineage.quants(parts["target"])))
        if kind not in parts and found
    }
    versions = {"release": release, **parts, **left_out}
    order = [release, *(v for v in versions.values() if v is not release)]
    measured = read([store.open(ref) for version in order for ref in version.evidence])
    target = parts["target"]
    since = datetime.now(UTC) - timedelta(days=config.max_age_days)
    loop = _last_loop(name, since)
    transports, transports_from = _transports(lineage, name)
    trained = json.loads(target.tags.get("lockstep.config", "{}"))
    return Known(
        versions=versions,
        measured=measured,
        transports=transports,
        transports_from=transports_from,
        training=trained.get("rl", {}),
        engine=trained.get("engine", {}),
        past=_past(lineage, store, name),
        automated=(standing := Standing.read()) is not None and standing.target == name,
        triggers=history.triggers(),
        triggered=[run for run in history.triggered(since) if run.target == name],
        loop=loop,
        started=history.of(loop.flow_run_ids[-1]) if loop and loop.flow_run_ids else None,
    )


def _release(lineage: Lineage, name: str, which: str) -> Version:
    model = registered_model(name, "release")
    labelled, slash, number = which.rpartition("/")
    if slash and labelled != model:
        raise LineageError(
            f"review.release={which}: that is not a release of {name}; its releases are called {model}/N"
        )
    found = lineage.resolve(model, number)
    if found is None:
        raise LineageError(f"review.release={which}: {name} has no such release; `lockstep lineage {name}` lists them")
    return found


def _transports(lineage: Lineage, name: str) -> tuple[pd.DataFrame, str]:
    run = newest_measured(lineage.client, lineage.experiment, "transport", name)
    if run is None:
        return evidence.concat([]), ""
    with tempfile.TemporaryDirectory() as folder:
        table = evidence.read(Path(lineage.client.download_artifacts(run, "evidence.parquet", folder)))
    return table, f"lockstep measure transport: MLflow run {run}, {table['hardware'].iloc[0]}"


def _last_loop(name: str, since: datetime) -> runs.Run | None:
    ended = [r for r in runs.every("loop") if r.target == name and r.finished and r.finished >= since]
    return max(ended, key=lambda run: run.finished, default=None)


def _past(lineage: Lineage, store: Store, name: str) -> list[PastRun]:
    found = []
    for version in reversed(lineage.versions(name)):
        steps = read([store.open(ref) for ref in version.evidence]).steps
        if len(steps):
            marked = int((steps.get("mismatch_warning", pd.Series(dtype=float)) > 0).sum())
            found.append(PastRun(version.label, float(steps["k3"].max()), marked, len(steps)))
    return found
