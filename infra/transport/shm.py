"""The `shm` transport, trainer side: weights in memory shared with engines of the same host."""

import secrets
import time
from collections.abc import Iterable

import torch

from infra.transport.base import ParamMeta, Published, SyncError
from infra.transport.checksum import Margins, as_matrix, blocks
from infra.transport.memory import Segment

_ALIGN = 64


class ShmSender:
    """Publishes weights by copying them into shared memory, which is reused from version to version.

    What was published stays valid until the next `publish` or `close`: `infra.transport.sync.sync` returns when no
    engine reads it any more.
    """

    def __init__(self, dtype: str | None = None) -> None:
        """dtype: the engines' weight type, such as `bfloat16`; none publishes each tensor in its own."""
        self._dtype = getattr(torch, dtype) if dtype else None
        self._sender, self._epoch = secrets.token_hex(8), time.time_ns()
        self._segment: Segment | None = None

    def __enter__(self) -> "ShmSender":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @torch.no_grad()
    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """Copy `named_tensors` (Hugging Face names, any device) and announce them as `version`.

        Raises SyncError when a tensor is not floating point or holds values that are not finite.
        """
        started = time.monotonic()
        tensors, metas, offset = dict(named_tensors), [], 0
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise SyncError(f"{name} is {tensor.dtype}: only floating-point parameters can be published")
            dtype = self._dtype or tensor.dtype
            nbytes = tensor.numel() * dtype.itemsize
            metas.append((name, dtype, list(tensor.shape), offset, nbytes))
            offset += -(-nbytes // _ALIGN) * _ALIGN
        segment = self._reserve(offset)
        segment.begin()
        memory = torch.frombuffer(segment.data, dtype=torch.uint8)
        params = []
        for name, dtype, shape, start, nbytes in metas:
            target = memory[start : start + nbytes].view(dtype)
            digest = _copy(name, tensors[name], target.view(shape))
            params.append(
                ParamMeta(
                    name=name,
                    dtype=str(dtype).removeprefix("torch."),
                    shape=shape,
                    offset=start,
                    nbytes=nbytes,
                    checksum=digest,
                )
            )
        segment.commit(version)
        return Published(
            transport="shm",
            version=version,
            sender=self._sender,
            sender_epoch=self._epoch,
            location=segment.location,
            params=params,
            publish_s=time.monotonic() - started,
        )

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


def _copy(name: str, source: torch.Tensor, target: torch.Tensor) -> str:
    """Copy and checksum block by block, so that the second reading finds each block in the cache."""
    source, target = as_matrix(source.detach()), as_matrix(target)
    margins, total = Margins(*target.shape), 0.0
    for row, block in blocks(target):
        block.copy_(source[row : row + block.shape[0]])
        margins.add(block, row=row)
        total += float(block.sum(dtype=torch.float32))
    if total != total or total in (float("inf"), float("-inf")):
        raise SyncError(f"{name} holds values that are not finite: the trainer has diverged, nothing was published")
    return margins.digest()
