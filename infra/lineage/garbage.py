"""Artifacts that nothing refers to, and their deletion while flows go on."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel

from infra.lineage.lineage import Lineage
from infra.lineage.versions import INPUTS, KIND, Version
from infra.services import results, runs, unfinished
from infra.store.base import ArtifactMissing, Store
from infra.store.refs import ArtifactRef

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Garbage(BaseModel):
    """What may be deleted.

    before: nothing that was put, or named by a result that was asked for, at or after this time is among it.
    because: what sets that time, in one line.
    kept, kept_bytes: of the other artifacts.
    """

    artifacts: list[ArtifactRef]
    before: datetime
    because: str
    kept: int
    kept_bytes: int

    @property
    def bytes(self) -> int:
        return sum(ref.bytes for ref in self.artifacts)


def find(lineage: Lineage, store: Store, grace: timedelta, *, data: bool = False) -> Garbage:
    """Artifacts that no version of any target names, older than `grace` and than every run that is not finished.

    A version names its artifact, its evidence, what it was made from, and the record of its refusal; the records of
    releases name more. data: what versions were made from (hidden states) counts only where a release serves them.
    A run that is live, waits, or was interrupted and can be resumed, may refer to whatever it has made or found since
    it began.
    """
    before, because = _horizon(grace)
    named = _named(lineage, store, data)
    asked = results.naming()
    chosen, kept = [], []
    for ref in store.list():
        recent = any(results.since(path) >= before for path in asked.get(ref.digest, ()) if path.exists())
        spared = ref.digest in named or recent or _created(store, ref) >= before
        (kept if spared else chosen).append(ref)
    return Garbage(
        artifacts=chosen, before=before, because=because, kept=len(kept), kept_bytes=sum(ref.bytes for ref in kept)
    )


def delete(
    lineage: Lineage, store: Store, garbage: Garbage, *, data: bool = False
) -> Iterator[tuple[ArtifactRef, bool]]:
    """Delete it; each artifact, and whether it is gone. One that has been named, put or asked for since stays.

    The kept results that name it go first: their tasks then work anew instead of handing out what is not there. No run
    can begin on this machine meanwhile.
    """
    with runs.nobody_begins():
        before = min(garbage.before, _horizon(timedelta(0))[0])
        named, asked = _named(lineage, store, data), results.naming()
        for ref in garbage.artifacts:
            free = ref.digest not in named and all([results.forget(path, before) for path in asked.get(ref.digest, ())])
            yield ref, free and _collect(store, ref, before)


def _collect(store: Store, ref: ArtifactRef, before: datetime) -> bool:
    try:
        return store.collect(ref, before)
    except ArtifactMissing:  # another one collects too
        return True


def _horizon(grace: timedelta) -> tuple[datetime, str]:
    """The time from which on everything stays, and why."""
    horizon, because = datetime.now(UTC) - grace, f"what is younger than {grace.total_seconds() / 86400:g} days stays"
    for run in runs.every():
        if run.status == "open" and run.started < horizon:
            state = "is at work" if runs.live(run) else "was interrupted and can be resumed"
            horizon, because = run.started, f"what is younger than {run.key} stays: it {state}"
    for started, name in unfinished.flow_runs():
        if started < horizon:
            horizon, because = started, f"what is younger than Prefect's flow run {name} stays: it is not finished"
    return horizon, because


def _created(store: Store, ref: ArtifactRef) -> datetime:
    try:
        return store.manifest(ref).created
    except ArtifactMissing:  # its deletion was interrupted
        return datetime.min.replace(tzinfo=UTC)


def _named(lineage: Lineage, store: Store, data: bool) -> set[str]:
    versions = list(_every_version(lineage))
    served = {label for v in versions if v.kind == "release" for label in v.parts.values()}
    found: set[str] = set()
    for version in versions:
        for tag, value in version.tags.items():
            if tag != INPUTS or not data or version.label in served:
                found.update(_DIGEST.findall(value))
        if version.kind == "release":
            found.update(ref.digest for ref in store.manifest(version.artifact).inputs)
    return found


def _every_version(lineage: Lineage) -> Iterator[Version]:
    token = None
    while True:
        page = lineage.client.search_registered_models(max_results=1000, page_token=token)
        for model in page:
            if KIND in model.tags:
                yield from lineage.versions(model.name)
        token = page.token
        if not token:
            return
