"""What lies between an S3 store and boto3."""

from typing import NamedTuple

THREADS = 16
PART_BYTES = 16 * 2**20
ATTEMPTS = 4
OWN_ATTEMPTS = 20  # about five minutes: when our own object storage dies, it is started again


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
