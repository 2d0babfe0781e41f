"""The steps of watching a drafter. Arguments and results are JSON, so that a finished step is not done again."""

import hashlib
import tempfile
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.config.flows import DrafterFlowConfig, WatchFlowConfig
from infra.engine.pin import engine_pin, hardware
from infra.lineage.lineage import Lineage
from infra.lineage.versions import LineageError, Version, registered_model
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.spans import Spans
from infra.store.base import Store
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.drafter import figures
from tasks.drafter.drift import Drift, Level, decide, levels, misfit
from tasks.drafter.figures import TABLE
from tasks.drafter.serving import engine, measuring
from tasks.drafter.steps import Measured, measure_drafter, measure_without
from tasks.drafter.traffic import Traffic
from tasks.evaluate import evidence
from tasks.evaluate.acceptance import keep
from tasks.evaluate.evidence import row

COMMAND = "lockstep watch"


class Watched(BaseModel):
    """What is watched.

    drafter: None where there is none at all. fresh: the drafter was measured on this target before, and is measured on
    other traffic now. before: its level when it was made. seed: of the fresh traffic.
    """

    model_config = ConfigDict(frozen=True)

    target: Version
    drafter: Version | None
    fresh: bool
    before: dict[str, Level]
    seed: int

    @property
    def on(self) -> str:
        """What the drafter is measured on, for people."""
        return f"fresh traffic of {self.target.label}" if self.fresh else self.target.label


class Seen(BaseModel):
    """The drafter and the target without it on the same prompts; both None when the engine cannot serve them together.
    spans: seconds by kind, of both."""

    drafter: Measured | None
    plain: Measured | None
    drift: Drift

    @property
    def spans(self) -> dict[str, float]:
        parts = [measured.spans for measured in (self.drafter, self.plain) if measured]
        return {
            kind: sum(part.get(kind, 0.0) for part in parts) for kind in sorted({k for part in parts for k in part})
        }


@durable(name="choose what is watched", outlives_edits=True)
def choose_watched(name: str, which: str, target: str | None, run: str) -> Watched:
    """The target version `which` (or the label `target`) and the drafter that would serve it: one made for it but never
    measured, else the champion's, else that of its nearest ancestor, else the newest. Kept with the run: there may be
    newer ones when it resumes.

    Raises LineageError when there is no such version.
    """
    lineage, store = Lineage(), open_store()
    version = lineage.get(target) if target else lineage.resolve(name, which)
    if version is None:
        raise LineageError(
            f"watch.target={which}: {name} has no such version in MLflow at {lineage.uri}; `lockstep rl` makes one, "
            f"`lockstep lineage` lists what there is"
        )
    own = lineage.drafters(version)
    measured = [drafter for drafter in own if drafter.evidence]
    champion = lineage.resolve(registered_model(name, "drafter"), "champion")
    if measured and target is None and champion is not None:
        version, drafter = lineage.get(champion.parts["target"]), champion
    elif measured:
        drafter = measured[0]
    else:
        drafter = next(iter(own), None) or champion or _inherited(lineage, version)
    seed = int(hashlib.sha256(run.encode()).hexdigest()[:8], 16)
    before = _level_when_made(lineage, store, drafter) if drafter else {}
    return Watched(target=version, drafter=drafter, fresh=bool(measured), before=before, seed=seed)


def unseen(usual: Traffic, other: Traffic) -> Traffic:
    """Prompts of `other` to measure on, none of which `usual` trains on: of every domain as many as `usual` measures
    on, for their shares decide the level over all. A domain that has too few gives those that it has."""
    trained = {tuple(prompt.token_ids) for prompt in usual.train}
    wanted, chosen = Counter(prompt.domain for prompt in usual.held_out), []
    for prompt in [*other.held_out, *other.train]:
        if wanted[prompt.domain] and tuple(prompt.token_ids) not in trained:
            wanted[prompt.domain] -= 1
            chosen.append(prompt)
    return Traffic(train=[], held_out=chosen)


def look(watched: Watched, traffic: Traffic, config: WatchFlowConfig, run: str) -> Seen:
    """Measure the watched drafter on the held-out prompts of `traffic`, beside the target without it, and decide."""
    drafter, target = watched.drafter, watched.target
    if drafter is None:
        drift = Drift(decision="retrain", reason=f"{target.name} has no drafter yet")
        return Seen(drafter=None, plain=None, drift=drift)
    if why := fits(drafter.artifact, target.artifact):
        drift = Drift(decision="retrain", reason=f"{drafter.label} cannot serve {target.label}: {why}")
        return Seen(drafter=None, plain=None, drift=drift)
    settings = config.narrow(DrafterFlowConfig)
    served = measure_drafter(target, drafter.artifact, f"{drafter.subject} on {watched.on}", traffic, None, settings)
    plain = measure_plain(target, traffic, settings)
    drift = decide(watched.before, levels(served.measurement.rows), config.watch)
    return Seen(drafter=served, plain=plain, drift=drift)


@durable(name="compare drafter and target")
def fits(drafter: ArtifactRef, target: ArtifactRef) -> str:
    """Why the two cannot be served together; empty when they can."""
    store = open_store()
    return misfit(store.open(drafter), store.open(target))


@durable(name="measure target", pools=["engines"])
def measure_plain(target: Version, traffic: Traffic, config: DrafterFlowConfig) -> Measured:
    """The target's answers and speed without speculation on the held-out prompts."""
    spans = Spans()
    spec = measuring(open_store().open(target.artifact), config)
    with engine(spec, config, spans) as handle, spans.measure("engine"):
        report(f"measuring {target.label} without speculation")
        measured = measure_without(handle, traffic, config, target.subject)
    return measured.model_copy(update={"spans": spans.seconds})


@durable(name="write the evidence of watching")
def write_evidence(watched: Watched, subject: str, seen: Seen, traffic: Traffic) -> ArtifactRef:
    """The evidence table about `subject` in the store: the figures of a drafter, whether it fits, what it lost
    (acceptance_lost), and what it took to know (measuring_seconds)."""
    drift, labels = seen.drift, dict(subject=subject, dataset_digest=traffic.held_out_digest())
    rows = [row("drafter_fits", float(seen.drafter is not None), n=1, unit="1 or 0", subject=subject)]
    seconds = sum(seen.spans.values())
    rows.append(row("measuring_seconds", seconds, n=len(traffic.held_out), unit="s", subject=subject))
    if drift.lost is not None:
        ends = dict(low=drift.lost_low, high=drift.lost_high)
        n = max(level.n for level in drift.now.values())
        rows.append(row("acceptance_lost", drift.lost, n=n, unit="share", domain="all", **ends, **labels))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if seen.drafter and seen.plain:
            known = dict(dataset_digest=labels["dataset_digest"], captured_tokens=0, captured_bytes=0)
            plain, drafted = seen.plain.all(), seen.drafter.all()
            measured = figures.rows(subject, None, plain, [], drafted, again=seen.plain.again, **known)
            rows += [found | {"subject": subject} for found in measured]
            keep(seen.plain.measurement, folder)
        table = evidence.table(rows, engine=engine_pin(), hardware=hardware(), command=COMMAND)
        evidence.write(table, folder / TABLE)
        made_from = [version.artifact for version in (watched.target, watched.drafter) if version]
        return open_store().put(folder, "evidence", producer=COMMAND, inputs=made_from)


def _inherited(lineage: Lineage, target: Version) -> Version | None:
    """The newest drafter of the nearest ancestor that has one, else the newest of any version."""
    ancestor = target
    while ancestor.parent:
        ancestor = lineage.get(ancestor.parent)
        if made := lineage.drafters(ancestor):
            return made[0]
    return lineage.resolve(registered_model(target.name, "drafter"), "latest")


def _level_when_made(lineage: Lineage, store: Store, drafter: Version) -> dict[str, Level]:
    """The first levels measured of the drafter; one that was kept for another target has those of when it was made."""
    while drafter.parent and (before := lineage.get(drafter.parent)).artifact.digest == drafter.artifact.digest:
        drafter = before
    for table in drafter.evidence:
        if found := levels(evidence.read(store.open(table) / TABLE), drafter.subject):
            return found
    return {}
