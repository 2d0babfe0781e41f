"""The `shm` transport, engine side."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infra.transport.base import ParamMeta, Published, SyncError
from infra.transport.memory import Reader, SharedMemoryError
from infra.transport.receiver import Fetch, Receiver


class ShmWeightTransferEngine(Receiver):
    """Takes weights from memory that the trainer shares. Mapped only while an update is prepared."""

    transport = "shm"

    @contextmanager
    def open(self, published: Published) -> Iterator[Fetch]:
        try:
            reader = Reader(published.location, published.version)
            memory = torch.frombuffer(reader.data, dtype=torch.uint8)

            def fetch(meta: ParamMeta) -> torch.Tensor:
                if meta.offset + meta.nbytes > memory.numel():
                    raise SyncError(f"{meta.name} lies outside of the published memory")
                values = memory[meta.offset : meta.offset + meta.nbytes]
                return values.view(getattr(torch, meta.dtype)).view(meta.shape)

            yield fetch
            reader.check()
        except SharedMemoryError as error:
            raise SyncError(str(error)) from error
