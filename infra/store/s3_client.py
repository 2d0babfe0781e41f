"""What lies between an S3 store and boto3."""

import hashlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

THREADS = 16
ATTEMPTS = 4
OWN_ATTEMPTS = 12  # about two minutes: when our own object storage dies, it is started again


class Access(NamedTuple):
    """Where a bucket is and who asks, in place of boto3's own settings."""

    endpoint: str
    region: str
    key: str
    secret: str

    def __repr__(self) -> str:
        return f"Access({self.endpoint!r}, {self.region!r}, {self.key!r}, ...)"


def connect(access: Access | None, attempts: int | None = None):
    """boto3's S3 client for `access`, or as boto3's own settings say. attempts: how often a request is made at most."""
    import boto3
    from botocore.config import Config

    # a session of our own: the default one keeps its first credentials
    session = boto3.Session(access.key, access.secret, region_name=access.region) if access else boto3.Session()
    retries = {"mode": "standard", "max_attempts": attempts or (OWN_ATTEMPTS if access else ATTEMPTS)}
    return session.client(
        "s3",
        endpoint_url=access.endpoint if access else None,
        config=Config(retries=retries, max_pool_connections=2 * THREADS, connect_timeout=10, read_timeout=60),
    )


class Arriving:
    """A file that is hashed while it is written. It cannot seek, so boto3 hands it its parts in order.

    It subscribes to its own transfer, to be closed at the end; an artifact may have more files than a process can have
    open.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Append `data`."""
        self._open().write(data)
        self._digest.update(data)

    def on_done(self, **_: object) -> None:
        """The transfer has ended."""
        self._open().close()  # a file without bytes was never written to

    @property
    def sha256(self) -> str:
        """Of what was written so far, in hex."""
        return self._digest.hexdigest()

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "wb")  # noqa: SIM115  (open until on_done)
        return self._file
