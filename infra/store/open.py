"""Which store a run uses."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.services.home import home
from infra.store.base import Store, StoreError


def open_store(url: str | None = None) -> Store:
    """The artifact store at `url`, else at `LOCKSTEP_STORE`, else in `artifacts` below Lockstep's home.

    url: a folder, or `file:///folder`.
    Raises StoreError for another scheme.
    """
    url = url or os.environ.get("LOCKSTEP_STORE") or str(home() / "artifacts")
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        from infra.store.local import LocalStore

        return LocalStore(Path(unquote(parts.path)))
    raise StoreError(f"artifact store {url!r} is not supported: use a folder or file:///folder")
