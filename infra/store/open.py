"""Which store a run uses."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.services.home import home
from infra.store.base import Store, StoreError
from infra.store.local import LocalStore


def open_store(url: str | None = None) -> Store:
    """The artifact store at `url`, else at `LOCKSTEP_STORE`, else in `artifacts` below Lockstep's home.

    url: a folder, `file:///folder`, or `s3://bucket/prefix`, whose artifacts are kept in `cache` below Lockstep's home
    once opened.
    Raises StoreError for another scheme or a URL that is not one.
    """
    url = url or os.environ.get("LOCKSTEP_STORE") or str(home() / "artifacts")
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme != "s3" or not parts.netloc:
        raise StoreError(f"artifact store {url!r} is not supported: use a folder, file:///folder or s3://bucket/prefix")
    from infra.store.s3 import S3Store

    prefix = parts.path.strip("/")

    try:
        return S3Store(parts.netloc, prefix, LocalStore(home() / "cache" / parts.netloc / prefix))
    except ValueError as error:
        raise StoreError(f"artifact store {url!r}: {error}") from None
