"""The local store under a killed writer and a full disk."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.store.base import ArtifactMissing
from infra.store.local import LocalStore
from infra.store.manifest import build, hash_files
from infra.store.refs import ArtifactRef

WRITER = """
import os, signal, sys
from pathlib import Path
from infra.store import local

at = int(sys.argv[3])
steps = 0


def die_at(frame, event, argument):
    global steps
    if frame.f_code.co_filename == local.__file__ and event == "line":
        steps += 1
        if steps == at:
            os.kill(os.getpid(), signal.SIGKILL)
    return die_at


store = local.LocalStore(Path(sys.argv[1]))
sys.settrace(die_at)
store.put(Path(sys.argv[2]), "target", producer="a writer that dies")
sys.settrace(None)
print(steps)
"""


def source(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(os.urandom(100_000))
    (folder / "config.json").write_text("{}")
    return folder


def expected(folder: Path) -> ArtifactRef:
    files = hash_files(folder, ["config.json", "weights"])
    return build(files, "target", "", [], None).ref


def write(store: Path, folder: Path, die_at: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WRITER, str(store), str(folder), str(die_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_a_writer_killed_at_any_line_leaves_all_or_nothing(tmp_path: Path):
    folder = source(tmp_path / "source")
    ref = expected(folder)
    steps = int(write(tmp_path / "whole", folder, 0).stdout)
    assert steps > 50
    seen = set()
    for at in range(1, steps + 1, max(1, steps // 12)):
        root = tmp_path / str(at)
        assert write(root, folder, at).returncode == -signal.SIGKILL
        store = LocalStore(root)
        try:
            store.verify(ref)
            seen.add("all")
        except ArtifactMissing:
            assert store.list() == []
            seen.add("nothing")
        assert store.put(folder, "target", producer="the next writer") == ref
        store.verify(ref)
        assert not list((root / ".staging").iterdir())
    assert seen == {"all", "nothing"}


FULL = """
import sys
from pathlib import Path
from infra.store.base import StoreFull
from infra.store.local import LocalStore

store = LocalStore(Path(sys.argv[1]))
small = store.put(Path(sys.argv[3]), "target", producer="")
try:
    store.put(Path(sys.argv[2]), "target", producer="")
except StoreFull as error:
    print(error)
assert store.list() == [small]
store.verify(small)
assert not list((store.root / ".staging").iterdir())
"""


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path):
    """The store lies on a file system of 1 MiB of its own, mounted where only the child process sees it."""
    mount = ["unshare", "--mount", "--map-root-user"] if os.getuid() else ["unshare", "--mount"]
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"mount -t tmpfs -o size=1m tmpfs {disk}"
    if not shutil.which("unshare") or subprocess.run([*mount, "sh", "-c", script], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount: run as root, or with unprivileged user namespaces")
    big, small = tmp_path / "big", tmp_path / "small"
    big.mkdir()
    small.mkdir()
    (big / "weights").write_bytes(b"x" * 2**21)
    (small / "weights").write_bytes(b"x" * 2**10)
    inside = [sys.executable, "-c", FULL, str(disk / "store"), str(big), str(small)]
    done = subprocess.run(
        [*mount, "sh", "-c", f'{script} && exec "$@"', "sh", *inside], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "no room in" in done.stdout and "it has 2 MiB" in done.stdout and "LOCKSTEP_STORE" in done.stdout
