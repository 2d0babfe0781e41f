"""The kept results of `durable` tasks: which artifacts they name, and when they were last asked for."""

import contextlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from infra.services.home import home

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def folder() -> Path:
    """Where Prefect keeps them."""
    return Path(os.environ.get("PREFECT_LOCAL_STORAGE_PATH") or home() / "results")


def used(key: str) -> None:
    """A task asks for the result `key` now. Called before it is looked up."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(folder() / key)


def naming() -> dict[str, list[Path]]:
    """Files of the results that name an artifact, by the artifact's digest."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder().glob("[!.]*")):
        for digest in set(_DIGEST.findall(path.read_text())) if path.is_file() else ():
            found.setdefault(digest, []).append(path)
    return found


def since(path: Path) -> datetime:
    """When the result was written or last asked for."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def forget(path: Path, before: datetime) -> bool:
    """Take a result away, so that its task works anew when it is called again; not if it was asked for at or after
    `before`. Whether it is gone."""
    aside = path.with_name(f".{path.name}")
    try:
        os.rename(path, aside)  # from here on no task finds it; one that asked earlier has left its time
    except FileNotFoundError:
        return True
    if since(aside) >= before:
        os.rename(aside, path)
        return False
    aside.unlink()
    return True
