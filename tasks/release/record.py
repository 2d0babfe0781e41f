"""The record of a release: evidence, gates, verdicts and answers in one artifact, from which it can be judged again."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from infra.config.release import Gate, Part
from infra.store.base import Store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.release.answers import Served
from tasks.release.candidate import PRODUCER, TABLE, Candidate
from tasks.release.decision import Decision, decide
from tasks.release.gates import Verdict, judge

JUDGEMENT, ANSWERS = "judgement.json", "answers.json"


class Judgement(BaseModel):
    """Verdicts, with all that they follow from but the evidence itself."""

    model_config = ConfigDict(frozen=True)

    gates: list[Gate]
    subjects: dict[Part, str]
    has_parent: bool
    verdicts: list[Verdict]
    decision: Decision


def judge_candidate(candidate: Candidate, gates: Sequence[Gate], table: pd.DataFrame) -> Judgement:
    """Judge `candidate` by the evidence in `table`."""
    return _judgement(table, list(gates), candidate.subjects, candidate.target.parent is not None)


def judge_again(folder: Path) -> Judgement:
    """The judgement that follows from the evidence and gates kept in the folder of a release or refusal."""
    kept = Judgement.model_validate_json((folder / JUDGEMENT).read_text())
    return _judgement(evidence.read(folder / TABLE), kept.gates, kept.subjects, kept.has_parent)


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


def _judgement(table: pd.DataFrame, gates: list[Gate], subjects: dict[Part, str], has_parent: bool) -> Judgement:
    verdicts = judge(table, gates, subjects, has_parent=has_parent)
    decision = decide(verdicts, drafter="drafter" in subjects, quant="quant" in subjects)
    return Judgement(gates=gates, subjects=subjects, has_parent=has_parent, verdicts=verdicts, decision=decision)
