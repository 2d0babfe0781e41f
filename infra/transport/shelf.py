"""Where the `store` transport keeps the versions of one sender: a folder that hosts share, or a bucket."""

import io
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

MANIFEST = "manifest.json"
_DAMAGED = ".damaged"
"""Left beside a version by an engine that could not use it, so that the next one is written whole."""


class Reader(Protocol):
    """A file of a version, read from its beginning."""

    def read(self, count: int) -> bytes:
        """The next `count` bytes; fewer at the end only."""
        ...

    def readinto(self, memory: memoryview) -> int:
        """Fill `memory` as far as the next piece goes; the number of bytes, 0 at the end."""
        ...


class Shelf(Protocol):
    """Versions are there once their manifest is. Several threads may put and read at once.

    url: of the shelf; what it raises names it. Raises OSError or StoreError where it cannot be reached or is full.
    """

    url: str

    def begin(self, version: int) -> None:
        """Make a place for `version`: what an attempt that failed left there is removed."""
        ...

    def put(self, version: int, file: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write one file, `parts` one after the other."""
        ...

    def commit(self, version: int, manifest: str) -> None:
        """Make `version` readable: all of its files are there."""
        ...

    def discard(self, version: int) -> None:
        """Remove what was begun and not committed."""
        ...

    def keep(self, version: int) -> None:
        """Remove all but `version`, and every mark."""
        ...

    def clear(self) -> None:
        """Remove all that the shelf holds. May be called again."""
        ...

    def manifest(self, version: int) -> str:
        """As it was committed. Raises FileNotFoundError when it was not."""
        ...

    def open(self, version: int, file: str) -> AbstractContextManager[Reader]:
        """Read one file. Raises FileNotFoundError when it is not there."""
        ...

    def mark_damaged(self, version: int) -> None:
        """Tell the sender that an engine could not use `version`. Where that is not allowed nothing happens."""
        ...

    def is_damaged(self, versions: Collection[int]) -> bool:
        """Whether an engine could not use one of them."""
        ...


def open_shelf(url: str) -> Shelf:
    """The shelf at `url`: a folder, or `s3://bucket/prefix`."""
    if url.startswith("s3://"):
        from infra.transport.bucket import BucketShelf

        return BucketShelf(url)
    return FolderShelf(Path(url))


def version_name(version: int) -> str:
    """Of a version on its shelf."""
    return f"version-{version:08d}"


class FolderShelf:
    """Below `folder`; a version that is written has a name with a dot until it is committed."""

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        self.url = str(self._folder)

    def begin(self, version: int) -> None:
        self.discard(version)
        self._scratch(version).mkdir(parents=True)

    def put(self, version: int, file: str, parts: Sequence[bytes | memoryview]) -> None:
        with open(self._scratch(version) / file, "wb", buffering=0) as target:
            for part in parts:
                target.write(part)
            os.fsync(target.fileno())

    def commit(self, version: int, manifest: str) -> None:
        (self._scratch(version) / MANIFEST).write_text(manifest)
        shutil.rmtree(self._place(version), ignore_errors=True)
        os.rename(self._scratch(version), self._place(version))

    def discard(self, version: int) -> None:
        shutil.rmtree(self._scratch(version), ignore_errors=True)

    def keep(self, version: int) -> None:
        for path in self._folder.iterdir():
            if path.suffix == _DAMAGED:
                path.unlink(missing_ok=True)
            elif path != self._place(version):
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def manifest(self, version: int) -> str:
        return (self._place(version) / MANIFEST).read_text()

    @contextmanager
    def open(self, version: int, file: str) -> Iterator[io.FileIO]:
        with open(self._place(version) / file, "rb", buffering=0) as source:
            yield source

    def mark_damaged(self, version: int) -> None:
        with suppress(OSError):  # an engine that may not write there waits for the next whole version
            self._place(version).with_suffix(_DAMAGED).touch()

    def is_damaged(self, versions: Collection[int]) -> bool:
        return any(self._place(version).with_suffix(_DAMAGED).exists() for version in versions)

    def _place(self, version: int) -> Path:
        return self._folder / version_name(version)

    def _scratch(self, version: int) -> Path:
        return self._folder / f".{version_name(version)}"
