"""Which store a run uses."""

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from infra.config.confidential import shown
from infra.services import profile, seaweed
from infra.services.home import home
from infra.services.record import Record, ServiceError
from infra.store.base import Store, StoreError
from infra.store.local import LocalStore

if TYPE_CHECKING:
    from infra.store.s3_client import Access


def open_store(url: str | None = None) -> Store:
    """The artifact store at `url`, else at `LOCKSTEP_STORE`, else that of the profile: `artifacts` below Lockstep's
    home, or the object storage that `lockstep up --profile team` started.

    url: a folder, `file:///folder`, or `s3://bucket/prefix`, whose artifacts are kept in `cache` below Lockstep's home
    once opened.
    Raises StoreError for another scheme, a URL that is not one or that holds credentials, ServiceError when that
    storage was not started.
    """
    url, access = url or os.environ.get("LOCKSTEP_STORE"), None
    if not url and profile.current() == "team":
        url, access = seaweed.ARTIFACTS, _own_access()
    url = url or str(home() / "artifacts")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise StoreError(
            f"artifact store {shown(url)!r} came with credentials or a query, which would be told wherever it is "
            f"named: set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL instead"
        )
    if parts.scheme in ("", "file"):
        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme != "s3" or not parts.netloc:
        raise StoreError(f"artifact store {url!r} is not supported: use a folder, file:///folder or s3://bucket/prefix")
    from infra.store.s3 import S3Store

    prefix = parts.path.strip("/")

    try:
        return S3Store(parts.netloc, prefix, LocalStore(home() / "cache" / parts.netloc / prefix), access)
    except ValueError as error:
        raise StoreError(f"artifact store {url!r}: {error}") from None


def access_to(bucket: str) -> "Access | None":
    """Who asks for objects in `bucket`: Lockstep itself for that of profile team, else whom boto3's own settings say.

    Raises ServiceError when that storage was not started.
    """
    return _own_access() if profile.current() == "team" and bucket == seaweed.BUCKET else None


def _own_access() -> "Access":
    from infra.store.s3_client import Access

    record = Record.read("seaweedfs")
    if record is None:
        raise ServiceError("the services of profile team are not running: start them with `lockstep up`")
    return Access(record.address, seaweed.REGION, *seaweed.credentials())
