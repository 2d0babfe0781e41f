"""What every artifact store offers, and the errors it raises."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from infra.store.manifest import Manifest
from infra.store.refs import ArtifactRef


class StoreError(RuntimeError):
    """An artifact could not be written or read."""


class ArtifactMissing(StoreError):
    """No artifact of this name is committed."""


class ArtifactConflict(StoreError):
    """Another content is committed under this name."""


class ArtifactCorrupt(StoreError):
    """The bytes that lie there are not the ones that were committed."""


class StoreFull(StoreError):
    """No room for the artifact."""


class Store(Protocol):
    """Artifacts: folders of files that exist as a whole or not at all, and never change."""

    url: str

    def put(
        self,
        folder: Path,
        kind: str,
        *,
        producer: str,
        inputs: Sequence[ArtifactRef] = (),
        name: str | None = None,
    ) -> ArtifactRef:
        """Commit the files below `folder`.

        kind: first part of the name, such as `target`, `hidden-states`, `evidence`.
        producer: what made it, such as `rl run 2026-..`; kept in the manifest.
        inputs: artifacts it was made from.
        name: by default `KIND/` and 16 hex digits of the digest; a name of your own must not be taken by other content.
        The files must not be written to any more: a store on the same disk shares them instead of copying.
        Committing the same content again changes nothing and returns the same reference.
        Raises ArtifactConflict when `name` holds other content, StoreFull when there is no room, StoreError for a
        folder that cannot be an artifact (empty, absent, special files). Nothing is left behind then.
        """

    def probe(self) -> None:
        """Write one byte and remove it. Raises StoreError where that cannot be done."""

    def open(self, ref: ArtifactRef) -> Path:
        """A local folder with the artifact's files (and `manifest.json`), to be read only.

        Raises ArtifactMissing, or ArtifactCorrupt when the files are not those of `ref.digest`.
        """

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """What was committed under `ref.name`. Raises ArtifactMissing, or ArtifactConflict for another digest."""

    def verify(self, ref: ArtifactRef) -> None:
        """Re-read and re-hash every byte. Raises as `open` does, naming the first file that differs."""

    def list(self, kind: str = "") -> list[ArtifactRef]:
        """The committed artifacts of a kind, or all, by name."""

    def collect(self, ref: ArtifactRef, before: datetime) -> bool:
        """Delete the artifact unless somebody put it at or after `before`; whether it was deleted.

        Whoever puts the same content at this moment either keeps it from being deleted, or commits it anew.
        Raises ArtifactMissing.
        """

    def delete(self, ref: ArtifactRef) -> None:
        """Remove the artifact: its manifest first, so that it is never seen in part. Raises ArtifactMissing."""


def check_held(held: Manifest, ref: ArtifactRef, where: object) -> None:
    """Raise ArtifactConflict when what a store at `where` holds under the name of `ref` is of other content."""
    if held.digest != ref.digest:
        raise ArtifactConflict(
            f"{ref.name} in {where} holds {held.digest}, not the wanted {ref.digest}: another content was committed "
            f"under this name"
        )


def check_unchanged(held: Manifest, new: Manifest, where: object) -> None:
    """Raise ArtifactConflict when `new` is of other content than what a store at `where` holds under its name."""
    if held.digest != new.digest:
        raise ArtifactConflict(
            f"{new.name} in {where} already holds {held.digest}, made by {held.producer}: the new content {new.digest} "
            f"needs another name"
        )
