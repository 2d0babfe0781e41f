"""The record of a release: evidence, gates, verdicts and answers in one artifact, from which it can be judged again."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from infra.config.gates import Gate, Part
from infra.config.release import ReleaseConfig, Waiver
from infra.lineage.versions import LineageError, Version
from infra.store.base import Store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.release.answers import Served
from tasks.release.candidate import PRODUCER, TABLE, Candidate
from tasks.release.decision import Decision, decide
from tasks.release.gates import Verdict, judge

JUDGEMENT, ANSWERS = "judgement.json", "answers.json"
REFUSAL = "lockstep.refusal"  # tag of a refused target: the record


class Judgement(BaseModel):
    """Verdicts, with all that they follow from but the evidence itself."""

    model_config = ConfigDict(frozen=True)

    gates: list[Gate]
    subjects: dict[Part, str]
    has_parent: bool
    waivers: list[Waiver] = []
    verdicts: list[Verdict]
    decision: Decision


def judge_candidate(candidate: Candidate, config: ReleaseConfig, table: pd.DataFrame) -> Judgement:
    """Judge `candidate` by the evidence in `table`, the gates and the waivers of `config`."""
    has_parent = candidate.target.parent is not None
    return judge_rows(table, config.judged, candidate.subjects, has_parent=has_parent, waivers=config.waivers)


def judge_rows(
    table: pd.DataFrame,
    gates: Sequence[Gate],
    subjects: Mapping[Part, str],
    *,
    has_parent: bool,
    waivers: Sequence[Waiver] = (),
) -> Judgement:
    """Verdicts of `gates` over `table` and what they allow; see `tasks.release.gates.judge`."""
    verdicts = judge(table, gates, subjects, has_parent=has_parent, waivers=waivers)
    decision = decide(verdicts, drafter="drafter" in subjects, quant="quant" in subjects)
    return Judgement(
        gates=list(gates),
        subjects=dict(subjects),
        has_parent=has_parent,
        waivers=list(waivers),
        verdicts=verdicts,
        decision=decision,
    )


def kept_judgement(folder: Path) -> Judgement:
    """The judgement in the folder of a release or refusal, as it was reached then."""
    return Judgement.model_validate_json((folder / JUDGEMENT).read_text())


def judge_again(folder: Path, gates: Sequence[Gate] | None = None) -> Judgement:
    """The judgement that follows from the evidence kept in the folder of a release or refusal and the gates kept there,
    or by `gates`. The waivers of that time count, as far as their gates are among them."""
    kept = kept_judgement(folder)
    gates = kept.gates if gates is None else gates
    waivers = [w for w in kept.waivers if w.gate in {gate.name for gate in gates}]
    table = evidence.read(folder / TABLE)
    return judge_rows(table, gates, kept.subjects, has_parent=kept.has_parent, waivers=waivers)


def record_of(version: Version) -> ArtifactRef:
    """The record of a release, or of the refusal of a target. Raises LineageError where there is none."""
    if version.kind == "release":
        return version.artifact
    if REFUSAL not in version.tags:
        raise LineageError(f"{version.label} was not refused and is no release: name a release, such as smol-release/3")
    return ArtifactRef.model_validate_json(version.tags[REFUSAL])


def keep(
    store: Store, table: ArtifactRef, judgement: Judgement, served: Served | None, candidate: Candidate
) -> ArtifactRef:
    """Store evidence, judgement and answers (none when refused) as one artifact, made from the candidate's parts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copyfile(store.open(table) / TABLE, folder / TABLE)
        (folder / JUDGEMENT).write_text(judgement.model_dump_json(indent=1))
        if served is not None:
            (folder / ANSWERS).write_text(served.model_dump_json(indent=1))
        inputs = [table, *(v.artifact for v in candidate.versions)]
        return store.put(folder, "release" if served else "refusal", producer=PRODUCER, inputs=inputs)


def keep_rows(
    store: Store, table: pd.DataFrame, judgement: Judgement, inputs: Sequence[ArtifactRef], producer: str
) -> ArtifactRef:
    """Store `table` and the judgement over it as one artifact of kind `evidence`."""
    with tempfile.TemporaryDirectory() as scratch:
        evidence.write(table, Path(scratch) / TABLE)
        (Path(scratch) / JUDGEMENT).write_text(judgement.model_dump_json(indent=1))
        return store.put(Path(scratch), "evidence", producer=producer, inputs=inputs)
