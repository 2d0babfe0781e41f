"""The local artifact store: whole or not at all, and never changed."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.store.base import ArtifactConflict, ArtifactCorrupt, ArtifactMissing, StoreError
from infra.store.local import LocalStore
from infra.store.manifest import FileEntry, Manifest, check_name
from infra.store.open import open_store
from infra.store.refs import ArtifactRef


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def test_put_and_open(store: LocalStore, tmp_path: Path):
    source = folder(tmp_path / "model", {"config.json": b"{}", "sub/weights.bin": b"x" * 1000})
    earlier = ArtifactRef(name="target/0", digest="sha256:0", bytes=0)
    ref = store.put(source, "target", producer="a test", inputs=[earlier])
    assert ref.name == f"target/{ref.digest[7:23]}"
    assert ref.bytes == 1002
    opened = store.open(ref)
    assert (opened / "sub/weights.bin").read_bytes() == b"x" * 1000
    manifest = store.manifest(ref)
    assert (manifest.producer, manifest.inputs, manifest.kind) == ("a test", [earlier], "target")
    assert [f.path for f in manifest.files] == ["config.json", "sub/weights.bin"]
    assert store.list("target") == store.list() == [ref]
    assert store.list("drafter") == []


def test_files_are_shared_not_copied_on_one_disk(store: LocalStore, tmp_path: Path):
    source = folder(tmp_path / "model", {"weights": b"x"})
    opened = store.open(store.put(source, "target", producer=""))
    assert os.path.samefile(source / "weights", opened / "weights")
    assert not os.stat(opened / "weights").st_mode & 0o222


def test_links_to_files_are_stored_as_files(store: LocalStore, tmp_path: Path):
    blob = folder(tmp_path / "blobs", {"b": b"weights"}) / "b"
    source = folder(tmp_path / "snapshot", {"config.json": b"{}"})
    (source / "model.safetensors").symlink_to(blob)
    opened = store.open(store.put(source, "target", producer=""))
    assert not (opened / "model.safetensors").is_symlink()
    assert (opened / "model.safetensors").read_bytes() == b"weights"


def test_the_same_content_again_changes_nothing(store: LocalStore, tmp_path: Path):
    ref = store.put(folder(tmp_path / "a", {"f": b"1"}), "kind", producer="first")
    path = store.open(ref) / "manifest.json"
    before = path.stat()
    assert store.put(folder(tmp_path / "b", {"f": b"1"}), "kind", producer="second") == ref
    assert path.stat() == before
    assert store.put(store.open(ref), "kind", producer="its own folder") == ref


def test_other_content_under_a_name_is_refused(store: LocalStore, tmp_path: Path):
    ref = store.put(folder(tmp_path / "a", {"f": b"1"}), "checkpoint", name="checkpoint/step-1", producer="first")
    with pytest.raises(ArtifactConflict, match="checkpoint/step-1 .* made by first"):
        store.put(folder(tmp_path / "b", {"f": b"2"}), "checkpoint", name="checkpoint/step-1", producer="second")
    store.verify(ref)
    assert store.list() == [ref]


@pytest.mark.parametrize("name", ["../out", "/abs", "a/../b", "a//b", "", ".hidden", "a/.b", "a\\b", "a b", "a/"])
def test_names_cannot_leave_the_store(store: LocalStore, tmp_path: Path, name: str):
    source = folder(tmp_path / "a", {"f": b"1"})
    with pytest.raises(ValueError):
        check_name(name)
    with pytest.raises(StoreError):
        store.put(source, name, producer="")
    with pytest.raises(StoreError):
        store.open(ArtifactRef(name=name, digest="sha256:0", bytes=0))
    assert not store.list()


@pytest.mark.parametrize("path", ["../f", "/etc/passwd", "a/../../f", "", "a\\b", "a\0b"])
def test_paths_in_a_manifest_cannot_leave_its_folder(path: str):
    with pytest.raises(ValueError):
        FileEntry(path=path, bytes=0, sha256="")


def test_a_manifest_that_points_outside_is_refused(store: LocalStore, tmp_path: Path):
    ref = store.put(folder(tmp_path / "a", {"f": b"1"}), "kind", producer="")
    path = store.root / ref.name / "manifest.json"
    evil = json.loads(path.read_text())
    evil["files"][0]["path"] = "../../../f"
    path.chmod(0o644)
    path.write_text(json.dumps(evil))
    with pytest.raises(ArtifactCorrupt, match="is not a manifest"):
        store.open(ref)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({}, "empty"),
        (None, "not a folder"),
    ],
)
def test_what_cannot_be_an_artifact(store: LocalStore, tmp_path: Path, content: dict | None, why: str):
    source = tmp_path / "source"
    if content is not None:
        source.mkdir()
    with pytest.raises(StoreError, match=why):
        store.put(source, "kind", producer="")


def test_special_files_and_linked_folders_are_refused(store: LocalStore, tmp_path: Path):
    source = folder(tmp_path / "a", {"f": b"1"})
    (source / "link").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="link is a link to a folder"):
        store.put(source, "kind", producer="")
    (source / "link").unlink()
    os.mkfifo(source / "pipe")
    with pytest.raises(StoreError, match="pipe is neither"):
        store.put(source, "kind", producer="")
    assert not store.list()


def damage_byte(path: Path):
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def damage_length(path: Path):
    path.chmod(0o644)
    os.truncate(path, 3)


def damage_absence(path: Path):
    path.unlink()


def damage_addition(path: Path):
    (path.parent / "extra.safetensors").write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_byte, damage_length, damage_absence, damage_addition])
def test_damage_is_found(store: LocalStore, tmp_path: Path, damage):
    ref = store.put(folder(tmp_path / "a", {"weights": b"12345678"}), "target", producer="")
    damage(store.open(ref) / "weights")
    with pytest.raises(ArtifactCorrupt, match="weights|extra"):
        store.verify(ref)
    if damage is not damage_addition:
        with pytest.raises(ArtifactCorrupt, match=r"artifact target/.* is damaged: weights"):
            store.open(ref)


def test_another_digest_is_not_given_out(store: LocalStore, tmp_path: Path):
    ref = store.put(folder(tmp_path / "a", {"f": b"1"}), "kind", producer="")
    with pytest.raises(ArtifactConflict, match="not the wanted sha256:0"):
        store.open(ref.model_copy(update={"digest": "sha256:0"}))
    with pytest.raises(ArtifactMissing, match="no artifact kind/none"):
        store.open(ref.model_copy(update={"name": "kind/none"}))


def test_delete(store: LocalStore, tmp_path: Path):
    ref = store.put(folder(tmp_path / "a", {"f": b"1"}), "kind", producer="")
    store.delete(ref)
    assert store.list() == []
    with pytest.raises(ArtifactMissing):
        store.delete(ref)
    assert (tmp_path / "a" / "f").read_bytes() == b"1"
    assert store.put(tmp_path / "a", "kind", producer="") == ref


def test_one_winner_among_writers_of_one_name(store: LocalStore, tmp_path: Path):
    sources = [folder(tmp_path / str(i), {"f": bytes([i]) * 10_000}) for i in range(8)]

    def put(source: Path) -> ArtifactRef | None:
        try:
            return store.put(source, "checkpoint", name="checkpoint/one", producer=source.name)
        except ArtifactConflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        refs = list(pool.map(put, sources))
    (winner,) = [ref for ref in refs if ref is not None]
    assert store.list() == [winner]
    store.verify(winner)
    assert not list((store.root / ".staging").iterdir())


NAMES = st.lists(st.text("ab.", min_size=1, max_size=4).filter(lambda s: s.strip(".")), min_size=1, max_size=3).map(
    "/".join
)


SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, suppress_health_check=SUPPRESSED)
@given(st.dictionaries(NAMES, st.binary(max_size=50), min_size=1, max_size=4))
def test_names_depend_on_content_alone(tmp_path: Path, files: dict[str, bytes]):
    sources = [tmp_path / "one", tmp_path / "two"]
    for source in sources:
        os.makedirs(source, exist_ok=True)
        for old in sorted(source.rglob("*"), reverse=True):
            old.rmdir() if old.is_dir() else old.unlink()
        for name, content in files.items():
            try:
                folder(source, {name: content})
            except OSError:
                continue  # one name is a file here and a folder there
    store = LocalStore(tmp_path / "store")
    one, two = (store.put(source, "kind", producer="") for source in sources)
    assert one == two
    manifest: Manifest = store.manifest(one)
    assert {f.path: (store.root / one.name / f.path).read_bytes() for f in manifest.files} == {
        p.relative_to(sources[0]).as_posix(): p.read_bytes() for p in sources[0].rglob("*") if p.is_file()
    }


def test_open_store_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert open_store(str(tmp_path)).url == tmp_path.as_uri()
    assert open_store(tmp_path.as_uri()).url == tmp_path.as_uri()
    monkeypatch.setenv("LOCKSTEP_STORE", str(tmp_path / "env"))
    assert open_store().url == (tmp_path / "env").as_uri()
    with pytest.raises(StoreError, match="ftp://"):
        open_store("ftp://host/folder")
    with pytest.raises(StoreError, match="^artifact store 's3://bucket/prefix' came with credentials") as refused:
        open_store("s3://id:planted@bucket/prefix?key=planted")
    assert "planted" not in str(refused.value)


def test_other_disk_errors_are_not_called_full(store: LocalStore, tmp_path: Path):
    (tmp_path / "store").write_text("a file where the store's folder should be")
    with pytest.raises(OSError) as error:
        store.put(folder(tmp_path / "a", {"f": b"1"}), "kind", producer="")
    assert error.value.errno in (errno.EEXIST, errno.ENOTDIR)
