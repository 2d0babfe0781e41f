"""The steps of a release. Arguments and results are JSON, so that a finished step is not done again."""

import tempfile
from pathlib import Path

from infra.config.flows import ReleaseFlowConfig
from infra.config.release import ReleaseConfig
from infra.config.target import EngineConfig
from infra.lineage.aliases import nominate, promote
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.services.prefect import durable
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.release.answers import Served
from tasks.release.candidate import PRODUCER, TABLE, Candidate, choose, gather
from tasks.release.record import Judgement, judge_candidate, keep
from tasks.release.serve import serve_and_ask, spec_of


@durable(name="choose what is released", outlives_edits=True)
def choose_candidate(
    name: str, config: ReleaseConfig, target: str | None, drafter: str | None, quant: str | None, run: str
) -> Candidate:
    """The versions that `config` means, or those given as labels. Kept with the run: aliases may move meanwhile."""
    return choose(Lineage(), name, target or config.target, drafter or config.drafter, quant or config.quant)


@durable(name="gather evidence")
def gather_evidence(candidate: Candidate, run: str) -> ArtifactRef:
    """All evidence about the parts of `candidate` as one table in the store."""
    store = open_store()
    with tempfile.TemporaryDirectory() as scratch:
        gather(Lineage(), store, candidate, Path(scratch))
        made_from = [v.artifact for v in candidate.versions]
        return store.put(Path(scratch), "evidence", producer=f"{PRODUCER} {run}", inputs=made_from)


@durable(name="judge by the gates")
def judge_by_gates(candidate: Candidate, table: ArtifactRef, config: ReleaseConfig) -> Judgement:
    """Verdicts of `config.gates` over the evidence in `table`, and what they allow."""
    return judge_candidate(candidate, config.gates, evidence.read(open_store().open(table) / TABLE))


@durable(name="serve and ask")
def serve_release(released: Candidate, engine: EngineConfig, config: ReleaseConfig, run: str) -> Served:
    """What the released combination answers, served by one engine as its users will meet it."""
    store = open_store()
    model = released.quant or released.target
    drafter = store.open(released.drafter.artifact) if released.drafter else None
    spec = spec_of(store.open(model.artifact), drafter, engine, config)
    return serve_and_ask(spec, config.questions, config.max_new_tokens)


@durable(name="keep the record")
def keep_record(candidate: Candidate, table: ArtifactRef, judgement: Judgement, served: Served | None) -> ArtifactRef:
    """Evidence, judgement and answers as one artifact."""
    return keep(open_store(), table, judgement, served, candidate)


def refuse(candidate: Candidate, judgement: Judgement, record: ArtifactRef) -> None:
    """Write on the target version that it was refused, why, and where the record is."""
    tags = {"lockstep.refused": judgement.decision.refusal, "lockstep.refusal": record.model_dump_json()}
    Lineage().tag(candidate.target, tags)


def register(
    released: Candidate, judgement: Judgement, record: ArtifactRef, config: ReleaseFlowConfig, mlflow_run: str
) -> Version:
    """Register the release and make it the candidate, then the champion."""
    lineage = Lineage()
    decision = judgement.decision
    release = lineage.register_release(
        released.target.name,
        record,
        target=released.target,
        drafter=released.drafter,
        quant=released.quant,
        run_id=mlflow_run,
        config=config,
        tags={"lockstep.left_out": "; ".join(decision.reasons), "lockstep.warnings": "; ".join(decision.warnings)},
    )
    nominate(lineage, release)
    promote(lineage, release)
    return release
