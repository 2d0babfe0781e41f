"""The artifact store in a local or shared folder."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from infra.store.base import ArtifactCorrupt, ArtifactMissing, StoreError, StoreFull, check_held, check_unchanged
from infra.store.disk import boot_id, place, sync, write
from infra.store.manifest import HASH_THREADS, MANIFEST, Manifest, build, check_name, files_of, hash_files
from infra.store.refs import ArtifactRef

_STAGING = ".staging"  # being written; a writer holds the lock beside its folder for as long as it lives
_VERIFIED = ".verified"  # what each file looked like when its hash was last found right
_WANTED = ".wanted"  # a file for each artifact that was put again: its time says when
_WRITERS = ".writers"  # locked by many who put, or by one who collects
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalStore:
    """Artifacts as folders below `root`.

    A writer fills a folder of its own, manifest last, and renames it to the artifact's name: the rename succeeds for
    one of several writers and shows all files at once. Files are hard links to the caller's where the disk allows it.
    """

    def __init__(self, root: Path):
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()

    def put(
        self, folder: Path, kind: str, *, producer: str, inputs: Sequence[ArtifactRef] = (), name: str | None = None
    ) -> ArtifactRef:
        """See `Store.put`. The files become read-only."""
        folder = Path(folder)
        try:
            check_name(kind)
            paths = files_of(folder)
        except ValueError as error:
            raise StoreError(f"cannot store {folder}: {error}") from None
        if not paths:
            raise StoreError(f"cannot store {folder}: it is {'empty' if folder.is_dir() else 'not a folder'}")
        try:
            need = sum((folder / path).stat().st_size for path in paths)
            with self._roomy(folder, need), self._locked(fcntl.LOCK_SH), self._staging() as stage:
                place(folder, stage, paths)
                manifest = build(hash_files(stage, paths), kind, producer, inputs, name)
                if self._is_there(manifest):
                    self._want(manifest.name)
                else:
                    self._commit(stage, manifest)
        except ValueError as error:
            raise StoreError(f"cannot store {folder}: {error}") from None
        return manifest.ref

    def adopt(self, manifest: Manifest, fill: Callable[[Path], None]) -> None:
        """Commit a copy of an artifact that lies elsewhere.

        fill: writes its files into the folder it is given, and raises unless they are those of `manifest`.
        Nobody waits until the copy is on the disk: it can be fetched again, and its hashes are read again when the
        machine was started anew. The files become read-only. Raises as `put` does.
        """
        with self._roomy(manifest.name, manifest.bytes), self._locked(fcntl.LOCK_SH), self._staging() as stage:
            fill(stage)
            for file in manifest.files:
                os.chmod(stage / file.path, 0o444)
            if not self._is_there(manifest):
                self._commit(stage, manifest, boot=boot_id())

    def probe(self) -> None:
        """See `Store.probe`."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(b"?")
        except OSError as error:
            raise StoreError(f"{self.root} cannot be written ({error.strerror})") from None

    def open(self, ref: ArtifactRef) -> Path:
        """See `Store.open`. Hashes are re-read only when a file's size, inode or time of writing has changed, or when
        a copy (`adopt`) may have been on its way to the disk when the machine went down."""
        manifest = self.manifest(ref)
        looks = self._looks(manifest)
        if self._stamped(ref.name) not in ({"boot": None, "looks": looks}, {"boot": boot_id(), "looks": looks}):
            self.verify(ref)
        return self.root / ref.name

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """See `Store.manifest`."""
        manifest = self._read(self._path(ref.name))
        check_held(manifest, ref, self.root)
        return manifest

    def verify(self, ref: ArtifactRef) -> None:
        """See `Store.verify`. A file that the manifest does not name is an error too."""
        manifest, folder = self.manifest(ref), self._path(ref.name)
        looks = self._looks(manifest)  # before hashing: a change in between must not be taken for verified
        expected = {f.path: f for f in manifest.files}
        there = files_of(folder)
        for path in sorted(expected.keys() ^ set(there)):
            raise self._corrupt(ref, path, "is missing" if path in expected else "does not belong to it")
        for entry in hash_files(folder, there):
            if entry != expected[entry.path]:
                raise self._corrupt(ref, entry.path, f"has {entry.bytes} bytes of other content than was committed")
        self._sync(folder, manifest)
        self._write_stamp(ref.name, looks)

    def delete(self, ref: ArtifactRef) -> None:
        """See `Store.delete`."""
        self.discard(self.manifest(ref).name)

    def discard(self, name: str) -> None:
        """Remove what lies under `name`, if anything does, whether it is whole or not."""
        folder = self._path(name)
        with self._staging() as stage, contextlib.suppress(FileNotFoundError):
            os.rename(folder, stage / "deleted")
            sync(folder.parent)
            self._stamp(name).unlink(missing_ok=True)
            (self.root / _WANTED / name).unlink(missing_ok=True)

    def collect(self, ref: ArtifactRef, before: datetime) -> bool:
        """See `Store.collect`. Waits until nobody writes to the store."""
        with self._locked(fcntl.LOCK_EX):
            wanted = self.manifest(ref).created
            with contextlib.suppress(FileNotFoundError):
                again = (self.root / _WANTED / ref.name).stat().st_mtime
                wanted = max(wanted, datetime.fromtimestamp(again, UTC))
            if wanted >= before:
                return False
            self.delete(ref)
            return True

    def _want(self, name: str) -> None:
        path, now = self.root / _WANTED / name, time.time_ns()
        write(path, "")
        os.utime(path, ns=(now, now))  # the clock by which the kernel dates files is milliseconds behind

    def _commit(self, stage: Path, manifest: Manifest, boot: str | None = None) -> None:
        """boot: for what nobody waits for to be on the disk, the machine's start after which it was written."""
        if boot is None:
            self._sync(stage, manifest)
            for at, _, _ in os.walk(stage):
                sync(Path(at))
        write(stage / MANIFEST, manifest.model_dump_json(indent=1), durably=boot is None)
        final = self._path(manifest.name)
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(stage, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not self._is_there(manifest):
                raise StoreError(f"{final} is in the way and is not an artifact: move it away") from None
            return
        if boot is None:
            sync(final.parent)
        self._write_stamp(manifest.name, self._looks(manifest), boot)

    def _sync(self, folder: Path, manifest: Manifest) -> None:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            list(pool.map(sync, [folder / f.path for f in manifest.files]))

    def _write_stamp(self, name: str, looks: dict[str, list[int]], boot: str | None = None) -> None:
        write(self._stamp(name), json.dumps({"boot": boot, "looks": looks}), durably=boot is None)

    def _stamped(self, name: str) -> dict | None:
        try:
            return json.loads(self._stamp(name).read_bytes())
        except (FileNotFoundError, ValueError):  # none, or one that did not reach the disk whole
            return None

    def _is_there(self, manifest: Manifest) -> bool:
        try:
            held = self._read(self._path(manifest.name))
        except ArtifactMissing:
            return False
        check_unchanged(held, manifest, self.root)
        return True

    def _read(self, folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactMissing(f"no artifact {folder.relative_to(self.root)} in {self.root}") from None
        except ValidationError as error:
            raise ArtifactCorrupt(f"{path} is not a manifest: {error.errors()[0]['msg']}") from None

    def _path(self, name: str) -> Path:
        try:
            return self.root / check_name(name)
        except ValueError as error:
            raise StoreError(str(error)) from None

    def _stamp(self, name: str) -> Path:
        return self.root / _VERIFIED / f"{name}.json"

    def _looks(self, manifest: Manifest) -> dict[str, list[int]]:
        looks = {}
        for file in manifest.files:
            path = self._path(manifest.name) / file.path
            try:
                s = path.lstat()
            except FileNotFoundError:
                raise self._corrupt(manifest.ref, file.path, "is missing") from None
            looks[file.path] = [s.st_size, s.st_ino, s.st_mtime_ns]
        return looks

    def _corrupt(self, ref: ArtifactRef, path: str, what: str) -> ArtifactCorrupt:
        return ArtifactCorrupt(
            f"artifact {ref.name} in {self.root} is damaged: {path} {what}; delete it and run again what made it"
        )

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.root / _WRITERS, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _roomy(self, what: object, need: int) -> Iterator[None]:
        """Raise the disk's being full as StoreFull. need: bytes of `what`."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            free = shutil.disk_usage(self.root).free
            raise StoreFull(
                f"no room in {self.root} for {what}: it has {need / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are "
                f"free ({os.strerror(error.errno)}); free space there or point LOCKSTEP_STORE to another disk"
            ) from error

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """A fresh folder on the store's disk, gone afterwards; also removes those of writers that died."""
        base = self.root / _STAGING
        base.mkdir(parents=True, exist_ok=True)
        everybody = os.open(base, os.O_RDONLY)
        try:
            fcntl.flock(everybody, fcntl.LOCK_EX)  # nobody sweeps between the making of a lock and its locking
            for lock in base.glob("*.lock"):
                _remove_if_dead(lock)
            fd, name = tempfile.mkstemp(suffix=".lock", dir=base)
            fcntl.flock(fd, fcntl.LOCK_EX)
        finally:
            os.close(everybody)
        lock = Path(name)
        stage = lock.with_suffix("")
        try:
            stage.mkdir()
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(fd)

    def list(self, kind: str = "") -> list[ArtifactRef]:
        """See `Store.list`."""
        start = self._path(kind) if kind else self.root
        refs = []
        for at, dirs, names in os.walk(start):
            if MANIFEST in names:
                refs.append(self._read(Path(at)).ref)
                dirs.clear()
            dirs[:] = [d for d in dirs if not d.startswith(".")]
        return sorted(refs, key=lambda ref: ref.name)


def _remove_if_dead(lock: Path) -> None:
    try:
        fd = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)
    finally:
        os.close(fd)
