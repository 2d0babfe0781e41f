"""Artifacts fetched from a real SeaweedFS: in parts, over lines that break, of objects that are not what they were."""

import json
import os
import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from infra.store.base import ArtifactCorrupt
from infra.store.local import LocalStore
from infra.store.s3 import S3Store
from infra.store.s3_client import PART_BYTES


@pytest.fixture
def store(s3_settings: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> S3Store:
    return S3Store("artifacts", request.node.originalname, LocalStore(tmp_path / "cache"))


def filled(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def replace(path: Path, content: str) -> None:
    """What looks the same until it is read."""
    looks = path.stat()
    path.chmod(0o644)
    path.write_text(content)
    os.utime(path, ns=(looks.st_atime_ns, looks.st_mtime_ns))


@contextmanager
def breaking(endpoint: str, after: int, times: int) -> Iterator[tuple[str, list[int]]]:
    """An address that leads to `endpoint`, and those connections so far that it broke off once `after` bytes had come
    back on them: the first `times` that got that far."""
    host, port = urlsplit(endpoint).netloc.split(":")
    broken: list[int] = []
    counting = threading.Lock()

    class Line(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((host, int(port))) as there:
                came = 0
                while True:
                    for ready in select.select([self.request, there], [], [])[0]:
                        try:
                            data = ready.recv(1 << 16)
                        except ConnectionResetError:
                            return
                        if not data:
                            return
                        (there if ready is self.request else self.request).sendall(data)
                        came += len(data) if ready is there else 0
                    with counting:
                        if came > after and len(broken) < times:
                            broken.append(came)
                            return

    class Lines(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Lines(("127.0.0.1", 0), Line) as lines:
        threading.Thread(target=lines.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{lines.server_address[1]}", broken
        finally:
            lines.shutdown()


@pytest.mark.parametrize("lost", ["f", "manifest.json", "stamp"])
def test_a_fetched_copy_is_read_again_after_the_machine_went_down(store: S3Store, tmp_path: Path, lost: str):
    ref = store.put(filled(tmp_path / "source", f=b"12345"), "target", producer="")
    opened, stamp = store.open(ref), store.cache.root / ".verified" / f"{ref.name}.json"
    replace(stamp, json.dumps(json.loads(stamp.read_text()) | {"boot": "another time the machine was started"}))
    path = stamp if lost == "stamp" else opened / lost
    replace(path, "\0" * path.stat().st_size)  # what may be left of a file whose content had not reached the disk
    assert (store.open(ref) / "f").read_bytes() == b"12345"


def test_large_files_arrive_in_parts_over_a_line_that_breaks(
    store: S3Store, s3_settings: pytest.MonkeyPatch, s3_endpoint: str, tmp_path: Path
):
    sizes = {"even": 2 * PART_BYTES, "odd": 2 * PART_BYTES + 1, "small": 1}
    source = filled(tmp_path / "source", **{name: os.urandom(size) for name, size in sizes.items()})
    ref = store.put(source, "target", producer="")
    with breaking(s3_endpoint, after=PART_BYTES // 2, times=3) as (address, broken):
        s3_settings.setenv("AWS_ENDPOINT_URL", address)
        opened = S3Store("artifacts", store.url.rpartition("/")[2], LocalStore(tmp_path / "other")).open(ref)
        assert len(broken) == 3
    for name in sizes:
        assert (opened / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("held", [PART_BYTES // 2, 2 * PART_BYTES - 1, 2 * PART_BYTES + 1])
def test_an_object_that_is_cut_or_grown_is_found(store: S3Store, tmp_path: Path, held: int):
    content = os.urandom(2 * PART_BYTES + 1)
    ref = store.put(filled(tmp_path / "source", f=content[: 2 * PART_BYTES]), "target", producer=str(held))
    key = f"test_an_object_that_is_cut_or_grown_is_found/files/{ref.name}/{ref.digest[7:23]}/f"
    store.client.put_object(Bucket="artifacts", Key=key, Body=content[:held])
    with pytest.raises(ArtifactCorrupt, match="damaged: f is not what was committed"):
        store.open(ref)
    assert store.cache.list() == []
