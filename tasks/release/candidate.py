"""What is to be released, and the evidence there is about it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from infra.config.gates import Part
from infra.engine.pin import engine_pin, hardware
from infra.lineage.check import check
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Kind, LineageError, Version, registered_model
from infra.store.base import Store
from infra.store.open import open_store
from tasks.evaluate import evidence
from tasks.release import fit
from tasks.release.against import drafter_rows, pair_rows

PRODUCER = "lockstep release"
TABLE = "evidence.parquet"
MadeFor = Callable[[Version], list[Version]]
MAKES = {"drafter": "drafter", "quant": "quantize"}  # the flow that makes it


class Candidate(BaseModel):
    """The triple that asks to be released."""

    model_config = ConfigDict(frozen=True)

    target: Version
    drafter: Version | None
    quant: Version | None

    @property
    def versions(self) -> list[Version]:
        """Its parts, the target first."""
        return [v for v in (self.target, self.drafter, self.quant) if v is not None]

    def kept(self, *, drafter: bool, quant: bool) -> "Candidate":
        """The same target with only those of its parts."""
        return Candidate(
            target=self.target, drafter=self.drafter if drafter else None, quant=self.quant if quant else None
        )

    @property
    def subjects(self) -> dict[Part, str]:
        """The evidence table's name of each part. What concerns safety is measured on the triple as a whole; the pair
        of drafter and quant goes by the quant's name."""
        names = {v.kind: v.subject for v in self.versions} | {"safety": f"release of {self.target.subject}"}
        return names | ({"pair": self.quant.subject} if self.drafter and self.quant else {})


def choose(lineage: Lineage, name: str, target: str, drafter: str, quant: str) -> Candidate:
    """The versions of target `name` that are meant, each as in the fields of `ReleaseConfig`, or a label (`smol/2`).

    Raises LineageError when one does not exist, or a drafter or quant was made for another target version.
    """
    chosen = lineage.resolve(name, _number(name, "target", target))
    if chosen is None:
        raise LineageError(
            f"release.target={target}: {name} has no such version in MLflow at {lineage.uri}; "
            f"`lockstep lineage` lists what there is"
        )
    return Candidate(
        target=chosen,
        drafter=_part(lineage, chosen, "drafter", drafter, lineage.drafters),
        quant=_part(lineage, chosen, "quant", quant, lineage.quants),
    )


def gather(lineage: Lineage, store: Store, candidate: Candidate, folder: Path) -> None:
    """Write all evidence about the candidate's parts, and whether its lineage is whole, to `folder`/evidence.parquet.

    Rows of a later measurement follow those of an earlier one.
    """
    measured = [evidence.read(store.open(ref) / TABLE) for v in candidate.versions for ref in v.evidence]
    labels = {v.label for v in candidate.versions}
    problems = check(lineage, store, candidate.target.name, only=labels)
    rows = [
        evidence.row(
            "lineage_problems",
            len(problems),
            n=len(labels),
            unit="problems",
            subject=candidate.subjects["safety"],
        )
    ]
    measured_at_all = 0.0 if candidate.target.unproven else 1.0
    rows.append(
        evidence.row("target_proven", measured_at_all, n=1, unit="1 or 0", subject=candidate.subjects["target"])
    )
    if candidate.target.parent:
        champion = lineage.resolve(candidate.target.name, "champion")
        against = champion is None or champion.label in (candidate.target.parent, candidate.target.label)
        rows.append(
            evidence.row("parent_is_champion", float(against), n=1, unit="1 or 0", subject=candidate.subjects["target"])
        )
    for part in candidate.versions[1:]:
        rows += fit.rows(store, candidate.target, part)
    rows += _compared(lineage, store, candidate, measured)
    own = evidence.table(rows, engine=engine_pin(), hardware=hardware(), command=PRODUCER)
    evidence.write(evidence.concat([*measured, own]), folder / TABLE)


def _compared(lineage: Lineage, store: Store, candidate: Candidate, measured: list[pd.DataFrame]) -> list[dict]:
    """What the evidence says of the drafter beside the champion's, and on the quant beside the target."""
    if candidate.drafter is None:
        return []
    table, rows = evidence.concat(measured), []
    champion = lineage.resolve(candidate.drafter.model, "champion")
    if champion and champion.label != candidate.drafter.label and champion.evidence:
        theirs = evidence.concat([evidence.read(store.open(ref) / TABLE) for ref in champion.evidence])
        rows += drafter_rows(table, theirs, subject=candidate.drafter.subject, champion=champion.subject)
    if candidate.quant:
        rows += pair_rows(table, drafter=candidate.drafter, quant=candidate.quant)
    return rows


def fastest(drafters: Sequence[Version]) -> Version | None:
    """Of the drafters of one target, whatever their kinds, the one whose measured speed over plain decoding is highest;
    none where none was measured."""
    store, speedups = open_store(), {}
    for drafter in drafters:
        for ref in drafter.evidence:
            table = evidence.read(store.open(ref) / TABLE)
            rows = table[(table["figure"] == "speculation_speedup") & (table["subject"] == drafter.subject)]
            if len(rows):
                speedups[drafter.label] = float(rows["value"].iloc[-1])  # a later measurement counts
    measured = [drafter for drafter in drafters if drafter.label in speedups]
    return max(measured, key=lambda drafter: speedups[drafter.label], default=None)


def _part(lineage: Lineage, target: Version, kind: Kind, which: str, made_for: MadeFor) -> Version | None:
    if which == "none":
        return None
    if which == "latest":
        return next(iter(made_for(target)), None)
    if which == "best" and kind == "drafter":
        return fastest(made_for(target))
    model = registered_model(target.name, kind)
    version = lineage.resolve(model, _number(model, kind, which))
    if version is None:
        raise LineageError(
            f"release.{kind}={which}: {model} has no such version; `lockstep lineage` lists what there is"
        )
    if version.parts["target"] != target.label:
        raise LineageError(
            f"release.{kind}={which}: {version.label} was made for {version.parts['target']}, not for {target.label}; "
            f"choose one that was, or make one with `lockstep {MAKES[kind]}`"
        )
    return version


def _number(model: str, kind: Kind, which: str) -> str:
    """What `Lineage.resolve` takes: the number of a label, anything else as it is."""
    labelled, slash, number = which.rpartition("/")
    if slash and labelled != model:
        raise LineageError(f"release.{kind}={which}: that is not a version of {model}")
    return number
