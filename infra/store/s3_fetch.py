"""Files out of a bucket: their parts at once, hashed as they arrive."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from infra.store.manifest import FileEntry
from infra.store.s3_client import PART_BYTES, THREADS

BLOCK_BYTES = 2**20
BEHIND_THE_END = 416  # the status of a request for bytes that an object does not have
PART_ATTEMPTS = 5  # connections that break in the middle of a part; each request has its own attempts besides


class Part(NamedTuple):
    """A stretch of an object: its key, the file it is part of, from byte `start` up to but not including `end`."""

    key: str
    file: FileEntry
    number: int
    start: int
    end: int


def fetch(client, bucket: str, files: Mapping[str, FileEntry], folder: Path) -> list[str]:
    """Write objects of `bucket` below `folder`; the paths of those whose content is not what their entry says.

    files: what each key holds.
    Files are fetched `THREADS` at a time, each from its beginning, so that few are open and hashing keeps up. Raises
    botocore's errors and OSError; what has not begun by then is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arriving = {key: _Arriving(folder / file.path, file) for key, file in files.items()}

    def one(part: Part) -> None:
        to = arriving[part.key]
        if not to.damaged:
            to.take(part, lambda write: _read(client, bucket, part, write))

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(one, part) for part in _parts(files)]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
            for file in arriving.values():
                file.close()
    return [file.entry.path for file in arriving.values() if not file.whole()]


def _parts(files: Mapping[str, FileEntry]) -> list[Part]:
    entries, found = list(files.items()), []
    for first in range(0, len(entries), THREADS):
        group = [
            Part(key, file, start // PART_BYTES, start, min(start + PART_BYTES, file.bytes))
            for key, file in entries[first : first + THREADS]
            for start in range(0, max(file.bytes, 1), PART_BYTES)
        ]
        found += sorted(group, key=lambda part: part.number)
    return found


def _read(client, bucket: str, part: Part, write: Callable[[bytes, int], None]) -> bool:
    """Hand each block of `part` and its place in the file to `write`; whether all of it was there."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError

    if part.start == part.end:
        return True  # a file without bytes: no range of it can be asked for
    attempts = PART_ATTEMPTS
    while True:
        try:
            return _read_once(client, bucket, part, write)
        except (HTTPClientError, IncompleteReadError, ConnectionError):
            attempts -= 1
            if not attempts:
                raise


def _read_once(client, bucket: str, part: Part, write: Callable[[bytes, int], None]) -> bool:
    from botocore.exceptions import ClientError

    try:
        answer = client.get_object(Bucket=bucket, Key=part.key, Range=f"bytes={part.start}-{part.end - 1}")
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != BEHIND_THE_END:
            raise
        return False
    at = part.start
    with contextlib.closing(answer["Body"]) as body:
        if answer["ContentRange"].rpartition("/")[2] != str(part.file.bytes):
            return False
        for block in body.iter_chunks(BLOCK_BYTES):
            write(block, at)
            at += len(block)
    return at == part.end


class _Arriving:
    """A file whose parts arrive in any order. Whoever brings the next one to be hashed hashes it, and what waits
    behind it, back from memory: the kernel has just been given it."""

    def __init__(self, path: Path, entry: FileEntry):
        self.entry, self.damaged = entry, False
        self._path, self._fd = path, -1
        self._digest, self._hashed = hashlib.sha256(), 0
        self._there: dict[int, Part] = {}  # by their first byte
        self._lock, self._hashing = threading.Lock(), threading.Lock()

    def take(self, part: Part, read: Callable[[Callable[[bytes, int], None]], bool]) -> None:
        """Have `read` write the part, then hash what can be hashed."""
        fd = self._open()
        if not read(lambda block, at: _write(fd, block, at)):
            self.damaged = True
            return
        with self._lock:
            self._there[part.start] = part
        while self._hashed in self._there and self._hashing.acquire(blocking=False):
            try:
                self._hash(fd)
            finally:
                self._hashing.release()
        if self._hashed == self.entry.bytes:
            self.close()

    def whole(self) -> bool:
        """Whether all that arrived is what was committed."""
        return not self.damaged and self._digest.hexdigest() == self.entry.sha256

    def close(self) -> None:
        """May be called again."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        with self._lock:
            if self._fd < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            return self._fd

    def _hash(self, fd: int) -> None:
        block = memoryview(bytearray(BLOCK_BYTES))
        while part := self._there.pop(self._hashed, None):
            at = part.start
            while at < part.end:
                read = os.preadv(fd, [block[: part.end - at]], at)
                self._digest.update(block[:read])
                at += read
            self._hashed = at


def _write(fd: int, block: bytes, at: int) -> None:
    left = memoryview(block)
    while left:
        written = os.pwrite(fd, left, at)
        left, at = left[written:], at + written
