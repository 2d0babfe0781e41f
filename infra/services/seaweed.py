"""SeaweedFS: object storage with an S3 interface, for artifacts and for MLflow's files."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from infra.services import secret
from infra.services.home import home
from infra.services.record import Record
from infra.services.supervise import LOOPBACK, ServiceError

PORT = 8333
PARTS = ("s3", "master", "volume", "filer")  # each listens on two ports, from the S3 port on upwards
PORTS = 2 * len(PARTS)
BUCKET = "lockstep"
ARTIFACTS, MLFLOW = f"s3://{BUCKET}/artifacts", f"s3://{BUCKET}/mlflow"
REGION = "us-east-1"
ACCESS_KEY = "lockstep"
VOLUME_MB = 1024
PROBE = "ready"  # an object that is read and written to see whether that can be done


class Keys(NamedTuple):
    """An S3 identity."""

    access: str
    secret: str


def command(port: int) -> list[str]:
    """What runs all parts of it in one process on loopback, S3 at `port`."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.is_file():
        raise ServiceError("the profile team needs SeaweedFS, which is not installed here: run `make install`")
    ports = []
    for at, part in enumerate(PARTS):
        ports += [f"-{part}.port={port + at}", f"-{part}.port.grpc={port + len(PARTS) + at}"]
    return [
        *(str(weed), "-logtostderr=true", "server", f"-dir={_data()}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}"),
        *("-filer", "-s3", *ports, f"-s3.config={_identities()}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-s3.iam=false", "-volume.max=0", f"-master.volumeSizeLimitMB={VOLUME_MB}", "-master.telemetry=false"),
        *("-master.electionTimeout=1s", "-volume.preStopSeconds=0"),  # there is but one of each: nobody to wait for
    ]


def prepare() -> None:
    """Make the data folder and the keys where there are none."""
    _data().mkdir(parents=True, exist_ok=True)
    credentials()


def ready(record: Record) -> bool:
    """Whether it gives what it holds and stores what it is given: it answers long before it finds its volumes, and an
    object without bytes needs none. The bucket is made on the way."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    keys = credentials()
    s3 = boto3.Session(keys.access, keys.secret, region_name=REGION).client(
        "s3", endpoint_url=record.address, config=Config(retries={"max_attempts": 1}, connect_timeout=5, read_timeout=5)
    )
    try:
        if BUCKET not in {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}:
            s3.create_bucket(Bucket=BUCKET)
        with suppress(s3.exceptions.NoSuchKey):
            s3.get_object(Bucket=BUCKET, Key=PROBE)["Body"].read()
        s3.put_object(Bucket=BUCKET, Key=PROBE, Body=b"ready")
        s3.get_object(Bucket=BUCKET, Key=PROBE)["Body"].read()
    except (ClientError, BotoCoreError):
        return False
    return True


def clean(record: Record) -> None:
    """Remove the sockets that it leaves in /tmp, wherever it is told to keep them."""
    for at, part in enumerate(PARTS):
        for name, port in ((part, record.port + at), (f"{part}-grpc", record.port + len(PARTS) + at)):
            Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)


def credentials() -> Keys:
    """The keys of the one identity there is."""
    identity = json.loads(_identities().read_text())["identities"][0]
    return Keys(**{name.removesuffix("Key"): value for name, value in identity["credentials"][0].items()})


def credentials_file() -> Path:
    """The same keys in boto3's format: AWS_SHARED_CREDENTIALS_FILE of whoever connects."""
    keys = credentials()
    text = f"[default]\naws_access_key_id = {keys.access}\naws_secret_access_key = {keys.secret}\n"
    return secret.file("aws", lambda: text)


def _identities() -> Path:
    def text() -> str:
        keys = {"accessKey": ACCESS_KEY, "secretKey": secret.make()}
        identity = {"name": ACCESS_KEY, "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        return json.dumps({"identities": [identity]})

    return secret.file("s3.json", text)


def _data() -> Path:
    return home() / "seaweedfs"
