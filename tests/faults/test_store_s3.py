"""The S3 store against a real SeaweedFS: races, interruptions, damage, credentials, a bucket without room."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from weed import seaweedfs

from infra.store.base import ArtifactConflict, ArtifactCorrupt, ArtifactMissing, StoreError, StoreFull
from infra.store.local import LocalStore
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from infra.store.s3 import S3Store
from infra.store.s3_errors import named
from infra.store.s3_wanted import condemn


@pytest.fixture
def store(s3_settings: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> S3Store:
    return S3Store("artifacts", request.node.originalname, LocalStore(tmp_path / "cache"))


def folder(path: Path, **files: bytes) -> Path:
    (path / "sub").mkdir(parents=True)
    for name, content in files.items():
        (path / name.replace("__", "/")).write_bytes(content)
    return path


def keys(store: S3Store) -> set[str]:
    found = store.client.list_objects_v2(Bucket=store.bucket, Prefix=store._prefix).get("Contents", [])
    return {o["Key"] for o in found}


def test_put_open_list_delete(store: S3Store, tmp_path: Path):
    source = folder(tmp_path / "model", config=b"{}", empty=b"", sub__weights=os.urandom(100_000))
    ref = store.put(source, "target", producer="a test")
    assert store.put(source, "target", producer="again") == ref
    assert store.manifest(ref).producer == "a test"
    assert store.list() == store.list("target") == [ref]
    assert store.list("drafter") == []
    opened = store.open(ref)
    assert (opened / "sub/weights").read_bytes() == (source / "sub/weights").read_bytes()
    assert (opened / "empty").read_bytes() == b""
    assert store.open(ref) == opened
    store.verify(ref)
    local = LocalStore(tmp_path / "local").put(source, "target", producer="")
    assert local == ref  # the same artifact whatever the store
    store.delete(ref)
    assert keys(store) == set()
    with pytest.raises(ArtifactMissing):
        store.open(ref)


def test_one_winner_among_writers_of_one_name(store: S3Store, tmp_path: Path):
    sources = [folder(tmp_path / str(i), f=bytes([i]) * 1000, same=b"same") for i in range(6)]

    def put(source: Path) -> ArtifactRef | None:
        own = S3Store("artifacts", "test_one_winner_among_writers_of_one_name", LocalStore(tmp_path / "cache"))
        try:
            return own.put(source, "checkpoint", name="checkpoint/one", producer=source.name)
        except ArtifactConflict as error:
            assert "already holds" in str(error)
            return None

    with ThreadPoolExecutor(6) as pool:
        refs = list(pool.map(put, sources))
    (winner,) = [ref for ref in refs if ref]
    store.verify(winner)
    assert len(keys(store)) == 3  # nothing of the others


def test_writers_of_the_same_content_agree(store: S3Store, tmp_path: Path):
    source = folder(tmp_path / "source", f=os.urandom(10_000))
    with ThreadPoolExecutor(4) as pool:
        refs = set(pool.map(lambda i: store.put(source, "target", producer=str(i)), range(4)))
    assert len(refs) == 1
    store.verify(*refs)


@pytest.mark.parametrize("damage", ["overwritten", "deleted"])
def test_damage_is_found(store: S3Store, tmp_path: Path, damage: str):
    source = folder(tmp_path / "source", f=b"12345", g=damage.encode())
    ref = store.put(source, "target", producer="")
    key = next(k for k in keys(store) if k.endswith("/f") and ref.digest[7:23] in k)
    if damage == "overwritten":
        store.client.put_object(Bucket="artifacts", Key=key, Body=b"12346")
    else:
        store.client.delete_object(Bucket="artifacts", Key=key)
    with pytest.raises(ArtifactCorrupt, match="damaged: f is not what was committed"):
        store.verify(ref)
    with pytest.raises(StoreError):
        store.open(ref)
    assert store.cache.list() == []


def test_a_damaged_cache_is_fetched_anew(store: S3Store, tmp_path: Path):
    ref = store.put(folder(tmp_path / "source", f=b"12345"), "target", producer="")
    path = store.open(ref) / "f"
    path.chmod(0o644)
    path.write_bytes(b"1234")
    assert (store.open(ref) / "f").read_bytes() == b"12345"


WRITER = """
import sys
from pathlib import Path
from infra.store.local import LocalStore
from infra.store.s3 import S3Store
from infra.store.s3_client import PART_BYTES
from infra.store.s3_wanted import condemn

store = S3Store("artifacts", sys.argv[1], LocalStore(Path(sys.argv[2])))
upload = store._upload


def upload_some(folder, manifest):
    small = manifest.model_copy(update={"files": [f for f in manifest.files if f.path != "big"]})
    upload(folder, small)
    big = next(f for f in manifest.files if f.path == "big")
    key = store._file_key(manifest, big)
    id = store.client.create_multipart_upload(Bucket=store.bucket, Key=key)["UploadId"]
    store.client.upload_part(Bucket=store.bucket, Key=key, UploadId=id, PartNumber=1, Body=b"x" * 5 * 2**20)
    print("half", flush=True)
    sys.stdin.readline()


store._upload = upload_some
store.put(Path(sys.argv[3]), "target", producer="a writer that dies")
"""


def test_a_killed_writer_leaves_nothing_visible_and_the_next_goes_on(store: S3Store, tmp_path: Path):
    source = folder(tmp_path / "source", big=os.urandom(6 * 2**20), small=b"small")
    command = [sys.executable, "-c", WRITER, "test_a_killed_writer_leaves_nothing_visible_and_the_next_goes_on"]
    writer = subprocess.Popen(
        [*command, str(tmp_path / "c"), str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert store.list() == []
    (small,) = keys(store)
    before = store.client.head_object(Bucket="artifacts", Key=small)["LastModified"]
    ref = store.put(source, "target", producer="the next")
    store.verify(ref)
    assert store.client.head_object(Bucket="artifacts", Key=small)["LastModified"] == before  # not sent again
    assert store.sweep(ref.name, timedelta(days=1)) == 0
    assert store.sweep(ref.name, timedelta(0)) == 1
    assert store.sweep(ref.name, timedelta(0)) == 0
    store.verify(ref)


def test_credentials_are_named_and_never_shown(store: S3Store, s3_settings: pytest.MonkeyPatch, tmp_path: Path):
    source = folder(tmp_path / "source", f=b"1")
    cases = [
        ("reader", "reader-secret", "may not do that"),
        ("nobody", "nobody-secret", "access key is not known"),
        ("writer", "wrong-secret", "secret key is not right"),
    ]
    for key, secret, why in cases:
        s3_settings.setenv("AWS_ACCESS_KEY_ID", key)
        s3_settings.setenv("AWS_SECRET_ACCESS_KEY", secret)
        refused = S3Store("artifacts", "refused", LocalStore(tmp_path / "cache"))
        with pytest.raises(StoreError, match=why) as error:
            refused.put(source, "target", producer="")
        assert secret not in str(error.value)
    s3_settings.delenv("AWS_ACCESS_KEY_ID")
    s3_settings.delenv("AWS_SECRET_ACCESS_KEY")
    s3_settings.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID"):
        S3Store("artifacts", "refused", LocalStore(tmp_path / "cache")).put(source, "target", producer="")


def test_a_full_bucket_is_named(
    s3_settings: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    """SeaweedFS itself says no more than InternalError."""
    with seaweedfs(tmp_path_factory.mktemp("small"), volumes=2, volume_mb=1) as url:
        s3_settings.setenv("AWS_ENDPOINT_URL", url)
        store = S3Store("artifacts", "", LocalStore(tmp_path / "cache"))
        with pytest.raises(StoreFull, match=r"the bucket is full \(InternalError\); delete artifacts") as error:
            store.put(folder(tmp_path / "big", **{f"f{i}": os.urandom(2**20) for i in range(8)}), "target", producer="")
        assert "\n" not in str(error.value)
        assert store.list() == []


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        ("ExpiredToken", 400, "the credentials have expired"),
        ("QuotaExceeded", 403, "the bucket is full"),
        ("", 507, "the bucket is full"),
        ("InternalError", 500, "InternalError sorry"),  # not full: it takes an object of one byte
    ],
)
def test_what_other_storages_say_is_one_line_too(code: str, status: int, why: str):
    answer = {"Error": {"Code": code, "Message": "sorry"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(StoreError, match=f"^storing x in s3://b: {why}") as error, named("s3://b", "storing x"):
        raise ClientError(answer, "PutObject")
    assert isinstance(error.value, StoreFull) == ("full" in why)


def test_places_that_are_not_there(store: S3Store, s3_settings: pytest.MonkeyPatch, tmp_path: Path):
    source = folder(tmp_path / "source", f=b"1")
    with pytest.raises(StoreError, match="no such bucket|may not do that"):
        S3Store("nowhere", "", LocalStore(tmp_path / "cache")).put(source, "target", producer="")
    s3_settings.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="is the object storage up"):
        S3Store("artifacts", "", LocalStore(tmp_path / "cache")).put(source, "target", producer="")


def test_open_store(s3_settings: pytest.MonkeyPatch, tmp_path: Path):
    s3_settings.setenv("LOCKSTEP_HOME", str(tmp_path))
    store = open_store("s3://artifacts/team/a")
    ref = store.put(folder(tmp_path / "source", f=b"1"), "target", producer="")
    assert store.open(ref) == tmp_path / "cache/artifacts/team/a" / ref.name
    with pytest.raises(StoreError, match="not allowed"):
        open_store("s3://artifacts/../other")


def test_whoever_commits_at_the_same_moment_keeps_the_artifact(store: S3Store, tmp_path: Path):
    source = folder(tmp_path / "source", weights=b"x" * 1000, sub__config=b"{}")
    ref = store.put(source, "target", producer="")
    assert not store.collect(ref, datetime.now(UTC) - timedelta(days=1))  # it is younger
    together = threading.Barrier(2)

    def collect(before: datetime) -> bool:
        together.wait()
        return store.collect(ref, before)

    def commit() -> ArtifactRef:
        together.wait()
        return store.put(source, "target", producer="")

    with ThreadPoolExecutor() as pool:
        for _ in range(10):
            collecting, committing = pool.submit(collect, datetime.now(UTC)), pool.submit(commit)
            assert committing.result() == ref
            collecting.result()
            store.verify(ref)
    assert store.collect(ref, datetime.now(UTC))
    assert store.list() == []
    with pytest.raises(ArtifactMissing):
        store.open(ref)


def test_a_deletion_that_was_interrupted_is_seen_by_nobody_and_ended_by_the_next(store: S3Store, tmp_path: Path):
    source = folder(tmp_path / "source", weights=b"x" * 1000)
    ref = store.put(source, "target", producer="")
    key = f"{store._prefix}manifests/{ref.name}.json"
    assert condemn(store.client, "artifacts", key, datetime.now(UTC))
    with pytest.raises(ArtifactMissing, match="it is being deleted"):
        store.manifest(ref)
    assert store.list() == [ref]  # for who collects
    assert store.collect(ref, datetime.now(UTC))
    assert "Contents" not in store.client.list_objects_v2(Bucket="artifacts", Prefix=store._prefix)
    assert store.put(source, "target", producer="") == ref
    store.verify(ref)
