"""Weights one after the other in flat memory: where each lies, how it gets there, and how it is read."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from infra.transport.base import ParamMeta, SyncError
from infra.transport.checksum import Margins, as_matrix, blocks, digests, margins_of

_ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: bytes [offset, offset + nbytes), row-major."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    offset: int
    nbytes: int


def lay_out(
    named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], list[Slot], int]:
    """The tensors by name, a slot for each, and the bytes of them all.

    dtype: type of the floating-point slots; none keeps each tensor's own. Integers keep theirs always.
    """
    tensors, slots, offset = dict(named_tensors), [], 0
    for name, tensor in tensors.items():
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * kind.itemsize
        slots.append(Slot(name, kind, list(tensor.shape), offset, nbytes))
        offset = _aligned(offset + nbytes)
    return tensors, slots, offset


def flat_bytes(params: list[ParamMeta]) -> int:
    """Bytes of the memory that `lay_out` gave these parameters."""
    return max((_aligned(meta.offset + meta.nbytes) for meta in params), default=0)


@torch.no_grad()
def fill(flat: torch.Tensor, tensors: dict[str, torch.Tensor], slots: list[Slot]) -> list[ParamMeta]:
    """Copy every tensor into its slot of `flat` [bytes], uint8 of any device, and describe what lies there.

    Raises SyncError when a tensor holds values that are not finite.
    """
    margins, totals = [], []
    for slot in slots:
        target = flat[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).view(slot.shape)
        sums, total = _copy(tensors[slot.name].detach(), target)
        margins.append(sums)
        totals.append(total)
    # Only here is a GPU waited for.
    for slot, finite in zip(slots, torch.stack(totals).isfinite().tolist() if totals else [], strict=True):
        if not finite:
            raise SyncError(
                f"{slot.name} holds values that are not finite: the trainer has diverged, nothing was published"
            )
    return [
        ParamMeta(
            name=slot.name,
            dtype=str(slot.dtype).removeprefix("torch."),
            shape=slot.shape,
            offset=slot.offset,
            nbytes=slot.nbytes,
            checksum=checksum,
        )
        for slot, checksum in zip(slots, digests(margins), strict=True)
    ]


def view(flat: torch.Tensor, meta: ParamMeta) -> torch.Tensor:
    """A published parameter where it lies in `flat`. Raises SyncError when it would lie outside."""
    if meta.offset < 0 or meta.offset + meta.nbytes > flat.numel():
        raise SyncError(f"{meta.name} lies outside of the published memory")
    return flat[meta.offset : meta.offset + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _copy(source: torch.Tensor, target: torch.Tensor) -> tuple[Margins, torch.Tensor]:
    """Copy; the margins of what was copied, and a number that is finite if all of it is."""
    if source.device != target.device:  # once over the link, after a GPU has read what it holds
        source = source.to(target.dtype)
        target.copy_(source)
        return margins_of(source), _total(source)
    source, target = as_matrix(source), as_matrix(target)
    margins = Margins(*target.shape, device=target.device)
    total = torch.zeros((), dtype=torch.float32, device=target.device)
    for row, block in blocks(target):  # so that the second reading finds each block in the cache
        block.copy_(source[row : row + block.shape[0]])
        margins.add(block, row=row)
        total += _total(block)
    return margins, total


def _total(values: torch.Tensor) -> torch.Tensor:
    if not values.is_floating_point():
        return torch.zeros((), dtype=torch.float32, device=values.device)
    return values.sum(dtype=torch.float32)
