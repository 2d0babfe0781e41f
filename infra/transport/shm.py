"""The `shm` transport: weights in memory that the trainer shares with engines of the same host."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from infra.transport.base import SAME_HOST, Fetch, Published, Reach, SyncError
from infra.transport.flat import fill, lay_out, view
from infra.transport.memory import Reader, Segment, SharedMemoryError
from infra.transport.publisher import Publisher


class ShmSender(Publisher):
    """Publishes weights by copying them into shared memory, which is reused from version to version.

    What was published stays valid until the next `publish` or `close`: `infra.transport.sync.sync` returns when no
    engine reads it any more. Any number of engines may read it.
    """

    transport = "shm"

    def __init__(self, dtype: str | None = None, reach: Reach = SAME_HOST) -> None:
        super().__init__(dtype, reach)
        self._segment: Segment | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], engines: int = 1) -> Published:
        """Copy `named_tensors` (Hugging Face names, any device) and announce them as `version`.

        Raises SyncError when a tensor holds values that are not finite.
        """
        started = time.monotonic()
        tensors, slots, size = lay_out(named_tensors, self.dtype)
        segment = self._reserve(size)
        segment.begin()
        params = fill(torch.frombuffer(segment.data, dtype=torch.uint8), tensors, slots)
        segment.commit(version)
        return self._announce(version, segment.location, params, started)

    def close(self) -> None:
        """Free the memory. May be called again."""
        if self._segment:
            self._segment.close()
            self._segment = None

    def _reserve(self, size: int) -> Segment:
        if self._segment and self._segment.size != size:
            self.close()
        self._segment = self._segment or Segment(size)
        return self._segment


class ShmSource:
    """Reads memory that the trainer shares. It stays mapped from update to update, since mapping it anew costs half of
    a copy, and is let go when an update fails or another trainer takes over."""

    lands = False

    def __init__(self, device: torch.device) -> None:
        """device: of the engine's model; the memory is the host's."""
        self._reader: Reader | None = None

    @contextmanager
    def open(self, published: Published) -> Iterator[Fetch]:
        try:
            reader = self._reader
            if reader is None or reader.location != published.location:
                reader = self._reader = Reader(published.location, published.version)
            else:
                reader.begin(published.version)
            yield partial(view, torch.frombuffer(reader.data, dtype=torch.uint8))
            reader.check()
        except SharedMemoryError as error:
            self.forget()
            raise SyncError(str(error)) from error
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        self._reader = None
