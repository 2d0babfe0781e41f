"""Who wants an artifact of a bucket, and who deletes it: they take turns by conditional puts of its manifest.

A manifest in the bucket may carry, beside its own fields, when it was put again (`wanted`) and when its deletion began
(`condemned`). Both are written only over the manifest that was read (`If-Match`), so that one of the two wins.
"""

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

TAKEN = (404, 409, 412)  # answers to a conditional put that came too late
DEAD = timedelta(minutes=10)  # no deletion of one artifact takes longer
POLL_S = 0.2


def condemned(body: bytes) -> datetime | None:
    """When the deletion of the artifact with the manifest `body` began; None when it is whole."""
    began = json.loads(body).get("condemned")
    return datetime.fromisoformat(began) if began else None


def want(client: Any, bucket: str, key: str) -> bool:
    """Keep the artifact whose manifest is `key` from being deleted. False when it is gone: it must be put as a new one.

    Waits for a deletion that has begun, unless whoever began it must have died.
    """
    while True:
        try:
            found = client.get_object(Bucket=bucket, Key=key)
        except client.exceptions.NoSuchKey:
            return False
        body = found["Body"].read()
        if began := condemned(body):
            if datetime.now(UTC) - began > DEAD:
                client.delete_object(Bucket=bucket, Key=key)
                return False
            time.sleep(POLL_S)
        elif _replace(client, bucket, key, found["ETag"], body, "wanted"):
            return True


def condemn(client: Any, bucket: str, key: str, before: datetime) -> bool:
    """Begin the deletion of the artifact unless somebody put it at or after `before`. Its files must be deleted next,
    its manifest last."""
    found = client.get_object(Bucket=bucket, Key=key)
    body = found["Body"].read()
    if condemned(body):
        return True
    held = json.loads(body)
    if max(datetime.fromisoformat(held[name]) for name in ("created", "wanted") if name in held) >= before:
        return False
    return _replace(client, bucket, key, found["ETag"], body, "condemned")


def _replace(client: Any, bucket: str, key: str, etag: str, body: bytes, field: str) -> bool:
    from botocore.exceptions import ClientError

    changed = json.dumps(json.loads(body) | {field: datetime.now(UTC).isoformat()}, indent=1)
    try:
        client.put_object(Bucket=bucket, Key=key, Body=changed.encode(), IfMatch=etag)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] not in TAKEN:
            raise
        return False
    return True
