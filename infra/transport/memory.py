"""Memory that a trainer shares with engines of the same host.

It is a memfd: it has no name in a file system, the kernel frees it when its owner and every process that maps it are
gone, however they end, and it does not count against the size of /dev/shm. Engines reach it as /proc/PID/fd/N of its
owner, which the kernel grants to processes of the same user.
"""

import fcntl
import mmap
import os
import secrets
import struct

_HEADER = struct.Struct("<8s16sqq")
_MAGIC = b"LOCKSTEP"
HEADER_BYTES = 4096
"""Reserved before the data, so that the data starts on a page."""


class SharedMemoryError(RuntimeError):
    """Shared memory that is gone, or that does not hold what was announced."""


class Segment:
    """The owner's side: `data` is writable memory of `size` bytes.

    Between `begin` and `commit` readers are told that the content is being rewritten.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.token = secrets.token_bytes(16)
        self._generation = 0
        self._fd = os.memfd_create("lockstep-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, HEADER_BYTES + size)
            # A reader of memory that shrinks would be killed by SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self._fd, HEADER_BYTES + size)
        except BaseException:
            os.close(self._fd)
            raise
        self.data = memoryview(self._map)[HEADER_BYTES:]

    @property
    def location(self) -> str:
        """How a reader of the same host opens it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}?token={self.token.hex()}"

    def begin(self) -> None:
        """The content is about to change."""
        self._generation += 1
        self._write_header(-1)

    def commit(self, version: int) -> None:
        """The content is complete and is `version`."""
        self._generation += 1
        self._write_header(version)

    def close(self) -> None:
        """Give up the memory. It is freed when the last reader has unmapped it. May be called again."""
        if self._fd >= 0:
            self.data = None  # the map itself goes with the last tensor that views it
            self._map = None
            os.close(self._fd)
            self._fd = -1

    def _write_header(self, version: int) -> None:
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, self.token, self._generation, version)


class Reader:
    """A reader's side: `data` holds `version` as announced by `location`. Writing to it changes a private copy only.

    Raises SharedMemoryError when the owner is gone, or when the memory holds something else.
    """

    def __init__(self, location: str, version: int) -> None:
        self.location = location
        self._path, _, token = location.partition("?token=")
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(error) from error
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES:
                raise SharedMemoryError(
                    f"{self._path} is not memory of a trainer: another process took the trainer's place"
                )
            self._map = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self._token = bytes.fromhex(token)
        self.begin(version)
        self.data = memoryview(self._map)[HEADER_BYTES:]

    def begin(self, version: int) -> None:
        """Read `version` from now on. Raises SharedMemoryError when the memory holds another, or its owner is gone."""
        try:
            os.stat(self._path)
        except OSError as error:
            raise self._gone(error) from error
        self._version, self._generation = version, None
        self._generation = self.check()

    def check(self) -> int:
        """Make sure that the memory still holds the announced version, untouched since `begin`; its generation.

        Raises SharedMemoryError otherwise.
        """
        magic, token, generation, version = _HEADER.unpack_from(self._map)
        if magic != _MAGIC or token != self._token:
            raise SharedMemoryError("the published memory is not the one announced: another process took its place")
        if version != self._version or self._generation not in (None, generation):
            found = "is being rewritten" if version < 0 else f"holds version {version}"
            raise SharedMemoryError(f"version {self._version} was announced, but the published memory {found}")
        return generation

    def _gone(self, error: OSError) -> SharedMemoryError:
        return SharedMemoryError(
            f"the published weights are gone ({self._path}: {error.strerror}): did the trainer die?"
        )
