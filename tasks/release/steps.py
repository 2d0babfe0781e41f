"""The steps of a release. Arguments and results are JSON, so that a finished step is not done again."""

import json
import tempfile
from pathlib import Path

from infra.config.flows import ReleaseFlowConfig
from infra.config.release import ReleaseConfig
from infra.lineage.aliases import nominate
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.services import runs
from infra.services.prefect import durable
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.release.answers import Served
from tasks.release.approval import Approval
from tasks.release.candidate import PRODUCER, TABLE, Candidate, choose, gather
from tasks.release.record import REFUSAL, Judgement, judge_candidate, keep
from tasks.release.serve import serve_and_ask, spec_of
from tasks.release.triple import SERVING, Serving

JUDGED = "lockstep.judged"  # tag of a target version: the run that judged it last, and its parts


@durable(name="choose what is released", outlives_edits=True)
def choose_candidate(
    name: str, config: ReleaseConfig, target: str | None, drafter: str | None, quant: str | None, run: str
) -> Candidate:
    """The versions that `config` means, or those given as labels. Kept with the run: aliases may move meanwhile."""
    return choose(Lineage(), name, target or config.target, drafter or config.drafter, quant or config.quant)


def still_missing(name: str, config: ReleaseConfig, target: str | None) -> str:
    """Why there is nothing to release, in one line: a part that `config` wants has not been measured yet, or the same
    parts have been judged, or are being judged now. Empty when there is."""
    lineage = Lineage()
    candidate = choose(lineage, name, target or config.target, config.drafter, config.quant)
    for kind, wanted, part in (
        ("drafter", config.drafter, candidate.drafter),
        ("quant", config.quant, candidate.quant),
    ):
        if wanted != "none" and (part is None or not part.evidence):
            return f"{candidate.target.label} has no measured {kind} yet"
    mark = json.loads(candidate.target.tags.get(JUDGED, "{}"))
    if mark.get("parts") == _labels(candidate) and not _interrupted(mark["run"]):
        return f"{', '.join(_labels(candidate))} were judged by {mark['run']}"
    return ""


def mark_judged(candidate: Candidate, run: str) -> None:
    """Write on the target version which parts this run judges."""
    mark = {"run": run, "parts": _labels(candidate)}
    Lineage().tag(candidate.target, {JUDGED: json.dumps(mark)})


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
    return judge_candidate(candidate, config, evidence.read(open_store().open(table) / TABLE))


@durable(name="serve and ask", pools=["engines"])
def serve_release(released: Candidate, config: ReleaseFlowConfig, run: str) -> Served:
    """What the released combination answers, served by one engine as its users will meet it."""
    store = open_store()
    spec = spec_of(store, released, config.engine, config.release.num_speculative_tokens)
    return serve_and_ask(spec, config.release.questions, config.release.max_new_tokens)


@durable(name="keep the record")
def keep_record(candidate: Candidate, table: ArtifactRef, judgement: Judgement, served: Served | None) -> ArtifactRef:
    """Evidence, judgement and answers as one artifact."""
    return keep(open_store(), table, judgement, served, candidate)


def refuse(candidate: Candidate, refusal: str, record: ArtifactRef) -> None:
    """Write on the target version that it was refused, why, and where the record is."""
    tags = {"lockstep.refused": refusal, REFUSAL: record.model_dump_json()}
    Lineage().tag(candidate.target, tags)


def register(
    released: Candidate,
    judgement: Judgement,
    record: ArtifactRef,
    config: ReleaseFlowConfig,
    mlflow_run: str,
    approval: Approval | None,
) -> Version:
    """Register the release and make it the candidate. approval: a person's, where one was asked."""
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
        tags={
            "lockstep.left_out": "; ".join(decision.reasons),
            "lockstep.warnings": "; ".join(decision.warnings),
            SERVING: Serving.of(config).model_dump_json(),
            **({"lockstep.approval": approval.model_dump_json()} if approval else {}),
        },
    )
    nominate(lineage, release)
    return release


def _labels(candidate: Candidate) -> list[str]:
    return [version.label for version in candidate.versions]


def _interrupted(run: str) -> bool:
    """Whether this run of this machine waits to be continued."""
    try:
        found = runs.read(run)
    except FileNotFoundError:
        return False
    return found.status == "open" and not runs.live(found)
