"""Whether the book of record is whole: content, links and evidence of every version."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from infra.lineage.aliases import aliases
from infra.lineage.lineage import Lineage
from infra.lineage.versions import KINDS, Version, registered_model
from infra.store.base import Store, StoreError
from infra.store.refs import ArtifactRef


class Problem(BaseModel):
    """One fault: the version that has it, and what is wrong."""

    model_config = ConfigDict(frozen=True)

    version: str
    what: str


def check(lineage: Lineage, store: Store, name: str, only: Collection[str] | None = None) -> list[Problem]:
    """Faults of the versions of target `name`, empty when all is well.

    only: labels of the versions to look at; all by default.
    Every artifact is re-hashed; every link must exist both ways and carry the right digest; a drafter or quant must
    have been made from the very content of its target, and measured on it; a release must have parts of one target and
    evidence of each; what an alias names must serve parts that have evidence of their own. A version that was adopted
    and never measured is no fault while nothing deployed serves it.
    """
    known = {v.label: v for kind in KINDS for v in lineage.versions(registered_model(name, kind))}
    chosen = [v for v in known.values() if only is None or v.label in only]
    problems = [Problem(version=label, what="is not registered") for label in only or () if label not in known]
    held = aliases(lineage, name)
    verified: dict[ArtifactRef, str] = {}
    for version in chosen:
        damage = list(_content(store, version, verified))
        faults = [*damage, *_links(version, known), *_origin(version, known)]
        if not damage:
            faults += _measured_on_target(store, version, known)
            faults += _evidence_of_parts(store, version, known)
        named = sorted(alias for alias, label in held.items() if label == version.label)
        faults += _deployed(version, known, named)
        problems += [Problem(version=version.label, what=fault) for fault in faults]
    for alias, label in held.items():
        if label not in known and (only is None or label in only):
            problems.append(Problem(version=label, what=f"is {alias} but not registered"))
    return problems


def _content(store: Store, version: Version, verified: dict[ArtifactRef, str]) -> Iterator[str]:
    for ref in (version.artifact, *version.evidence):
        if ref not in verified:
            try:
                store.verify(ref)
                verified[ref] = ""
            except StoreError as error:
                verified[ref] = str(error)
        if verified[ref]:
            yield verified[ref]


def _links(version: Version, known: Mapping[str, Version]) -> Iterator[str]:
    for label in _named(version):
        other = known.get(label)
        if other is None:
            yield f"names {label}, which is not registered"
        elif version.label not in other.links:
            yield f"names {label}, which does not name it back"
    for label, digest in version.links.items():
        other = known.get(label)
        if other is None:
            yield f"is named by {label}, which is not registered"
        elif version.label not in _named(other):
            yield f"is said to be named by {label}, which does not name it"
        elif digest != other.artifact.digest:
            yield f"is named by {label} with digest {digest}, but that has {other.artifact.digest}"


def _origin(version: Version, known: Mapping[str, Version]) -> Iterator[str]:
    for kind, label in version.parts.items():
        part = known.get(label)
        if part is None:
            continue  # already a broken link
        if part.kind != kind:
            yield f"names {label} as its {kind}, but that is a {part.kind}"
        if part.artifact.digest not in {ref.digest for ref in version.inputs}:
            yield f"names {label}, but was not made from its content {part.artifact.digest}"
        target = part.parts.get("target")
        if version.kind == "release" and target not in (None, version.parts["target"]):
            yield f"serves {version.parts['target']} with {label}, which was made for {target}"


def _measured_on_target(store: Store, version: Version, known: Mapping[str, Version]) -> Iterator[str]:
    """A measurement is one of this version on its target if its evidence was made from the content of both."""
    target = known.get(version.parts.get("target", ""))
    if version.kind not in ("drafter", "quant") or target is None:
        return
    wanted = {version.artifact.digest, target.artifact.digest}
    measured = [{ref.digest for ref in store.manifest(evidence).inputs} for evidence in version.evidence]
    if any(wanted <= digests for digests in measured):
        return
    if measured:
        yield f"points to {target.label}, but none of its evidence was measured on that"
    elif not version.unproven:
        yield f"points to {target.label} without having been measured on it: continue or repeat the run that made it"


def _evidence_of_parts(store: Store, version: Version, known: Mapping[str, Version]) -> Iterator[str]:
    import pandas as pd

    if version.kind != "release":
        return
    if not version.evidence:
        yield "has no evidence"
        return
    subjects: set[str] = set()
    for table in (store.open(ref) / "evidence.parquet" for ref in version.evidence):
        if table.is_file():
            subjects.update(pd.read_parquet(table, columns=["subject"])["subject"])
        else:
            yield f"has an evidence artifact without a table: {table} does not exist"
    for label in version.parts.values():
        if label in known and known[label].subject not in subjects:
            yield f"serves {label} without evidence of it"


def _deployed(version: Version, known: Mapping[str, Version], aliases: Sequence[str]) -> Iterator[str]:
    """What is deployed, or may be next, serves nothing that was only adopted."""
    for label in version.parts.values() if aliases else ():
        part = known.get(label)
        if part is not None and not part.evidence:
            yield f"is {' and '.join(aliases)} and serves {label}, which has no evidence"


def _named(version: Version) -> list[str]:
    return [*version.parts.values(), *([version.parent] if version.parent else [])]
