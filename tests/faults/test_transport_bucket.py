"""Weights through object storage: whole versions, changes, what is damaged there, and who may not read it."""

import boto3
import pytest
import torch
from weed import KEYS, arguments

from infra.store.base import StoreError
from infra.transport.base import Published, Reach, SyncError
from infra.transport.store import StoreSender, StoreSource

CPU = torch.device("cpu")
WHERE = "s3://artifacts/a/run"


@pytest.fixture
def bucket(s3_endpoint, monkeypatch):
    """boto3's own client of the bucket that the environment names."""
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": s3_endpoint}).items():
        monkeypatch.setenv(name, value)
    return boto3.client("s3", endpoint_url=s3_endpoint, **arguments())


def keys(bucket) -> list[str]:
    found = bucket.list_objects_v2(Bucket="artifacts", Prefix="a/run/").get("Contents", [])
    return [entry["Key"] for entry in found]


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {"a": torch.randn(300, 70, generator=random), "b": torch.randn(7, generator=random)}


def nudged(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return old | {"a": old["a"] + torch.eye(*old["a"].shape)}


def holds(source: StoreSource, published: Published, wanted: dict[str, torch.Tensor]) -> bool:
    with source.open(published) as fetch:
        return all(torch.equal(fetch(meta), wanted[meta.name]) for meta in published.params)


def test_changes_follow_a_whole_version_and_nothing_is_left_behind(bucket):
    early, now = StoreSource(CPU), weights()
    with StoreSender("float32", Reach(folder=WHERE), whole_every=3) as sender:
        assert holds(early, sender.publish(1, now.items()), now)
        whole = sender.manifest.bytes
        for version in (2, 3):
            now = nudged(now)
            published = sender.publish(version, now.items())
            assert sender.manifest.base == version - 1 and sender.manifest.bytes < whole / 20
            assert holds(early, published, now)
        assert holds(StoreSource(CPU), published, now)  # one that joins takes the whole version and each change
        assert holds(StoreSource(CPU), sender.publish(4, now.items()), now)
        assert sender.manifest.base is None and all("/version-00000004/" in key for key in keys(bucket))
    assert not keys(bucket)


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "manifest"])
def test_a_damaged_change_is_named_and_the_next_version_is_whole(bucket, how):
    source, now = StoreSource(CPU), weights()
    with StoreSender("float32", Reach(folder=WHERE)) as sender:
        assert holds(source, sender.publish(1, now.items()), now)
        now = nudged(now)
        published = sender.publish(2, now.items())
        kind = "manifest.json" if how == "manifest" else ".safetensors"
        (key,) = (key for key in keys(bucket) if "/version-00000002/" in key and key.endswith(kind))
        body = bytearray(bucket.get_object(Bucket="artifacts", Key=key)["Body"].read())
        if how == "missing":
            bucket.delete_object(Bucket="artifacts", Key=key)
        else:
            body[-3] ^= how == "flipped"
            new = {"flipped": body, "short": body[:-1], "manifest": b"{}"}[how]
            bucket.put_object(Bucket="artifacts", Key=key, Body=bytes(new))
        with pytest.raises(SyncError, match=f"s3://artifacts/{key} (is not what the trainer wrote|cannot be read)"):
            holds(source, published, now)
        now = nudged(now)
        published = sender.publish(3, now.items())
        assert sender.manifest.base is None and holds(source, published, now)


def test_a_version_is_not_readable_before_it_is_whole(bucket):
    with StoreSender("float32", Reach(folder=WHERE)) as sender:
        published = sender.publish(1, weights().items())
        sender._shelf.begin(1)  # the trainer writes it anew
        with pytest.raises(SyncError, match="version-00000001 is not there: was the trainer stopped"):
            holds(StoreSource(CPU), published, weights())


def test_who_may_not_read_or_write_is_told_so_on_one_line(bucket, monkeypatch):
    with StoreSender("float32", Reach(folder=WHERE)) as sender:
        published = sender.publish(1, weights().items())
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        told = r"^\w+ weights in s3://artifacts/a/run\S*: the secret key is not right"
        with pytest.raises(SyncError, match=told):
            holds(StoreSource(CPU), published, weights())
        stranger = StoreSender("float32", Reach(folder=WHERE))
        with pytest.raises(StoreError, match=told):
            stranger.publish(1, weights().items())
