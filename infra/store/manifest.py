"""The manifest: which files an artifact consists of, and what they hash to."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, field_validator

from infra.store.refs import ArtifactRef

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*(/[A-Za-z0-9][A-Za-z0-9._+=-]*)*")
HASH_THREADS = max(2, min(16, os.cpu_count() or 2))


class FileEntry(BaseModel):
    """One file: path relative to the artifact's folder, size in bytes, hex sha256."""

    model_config = ConfigDict(frozen=True)

    path: str
    bytes: int
    sha256: str

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
            raise ValueError(f"path {path!r} leaves the artifact's folder")
        return path


class Manifest(BaseModel):
    """What `manifest.json` holds; the artifact exists if and only if it does."""

    name: str
    kind: str
    digest: str
    bytes: int
    files: list[FileEntry]
    producer: str
    inputs: list[ArtifactRef]
    created: datetime

    @property
    def ref(self) -> ArtifactRef:
        return ArtifactRef(name=self.name, digest=self.digest, bytes=self.bytes)


def build(
    files: Sequence[FileEntry], kind: str, producer: str, inputs: Sequence[ArtifactRef], name: str | None
) -> Manifest:
    """The manifest of `files`, named after their digest unless `name` is given. Raises ValueError for a bad name."""
    files = sorted(files, key=lambda f: f.path)
    digest = digest_of(files)
    return Manifest(
        name=check_name(name or f"{kind}/{digest[7:23]}"),
        kind=check_name(kind),
        digest=digest,
        bytes=sum(f.bytes for f in files),
        files=files,
        producer=producer,
        inputs=list(inputs),
        created=datetime.now(UTC),
    )


def digest_of(files: Sequence[FileEntry]) -> str:
    """`sha256:` of the canonical list of files: (path, bytes, sha256) sorted by path, as JSON without spaces."""
    rows = sorted((f.path, f.bytes, f.sha256) for f in files)
    return "sha256:" + hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def check_name(name: str) -> str:
    """`name` itself when it is a relative path of plain segments. Raises ValueError otherwise."""
    if not _NAME.fullmatch(name) or ".." in name.split("/"):
        raise ValueError(
            f"artifact name {name!r} is not allowed: use segments of letters, digits and ._+=- that start with a "
            f"letter or digit, joined by /"
        )
    return name


def hash_files(folder: Path, paths: Sequence[str]) -> list[FileEntry]:
    """Size and sha256 of the files `paths` (relative to `folder`), hashed in parallel threads."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(lambda path: _hash(folder, path), paths))


def files_of(folder: Path) -> list[str]:
    """Relative paths of the files below `folder`, sorted, its own top-level manifest left out.

    Links to files count as the files they point to. Raises ValueError for anything but files and folders, and for
    linked folders: what they hold may lie anywhere.
    """
    found: list[str] = []
    for at, dirs, names in os.walk(folder):
        for name in (*dirs, *names):
            path = Path(at) / name
            if path.is_dir():
                if path.is_symlink():
                    raise ValueError(f"{path} is a link to a folder: put the folder itself there")
            elif path.is_file():
                found.append(path.relative_to(folder).as_posix())
            else:
                raise ValueError(f"{path} is neither a file nor a folder: remove it")
    if MANIFEST in found:
        found.remove(MANIFEST)
    return sorted(found)


def _hash(folder: Path, path: str) -> FileEntry:
    with open(folder / path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileEntry(path=path, bytes=file.tell(), sha256=digest.hexdigest())
