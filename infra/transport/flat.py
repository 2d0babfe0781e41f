"""Weights one after the other in flat memory: where each lies, how it gets there, and how it is read."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from infra.transport.base import ParamMeta, SyncError
from infra.transport.checksum import Margins, as_matrix, blocks, fits_stack, margins_of, sums_of, written

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
    checksums: dict[str, str] = {}
    far = [slot for slot in slots if tensors[slot.name].device != flat.device]
    near = [slot for slot in slots if tensors[slot.name].device == flat.device]
    for some, copy in ((far, _copy_far), (near, _copy_near)):
        if not some:
            continue
        sums, totals = copy(flat, tensors, some)
        # Only here is a GPU waited for.
        for slot, finite in zip(some, totals.isfinite().tolist(), strict=True):
            if not finite:
                raise SyncError(
                    f"{slot.name} holds values that are not finite: the trainer has diverged, nothing was published"
                )
        checksums |= zip((slot.name for slot in some), written(sums), strict=True)
    return [
        ParamMeta(
            name=slot.name,
            dtype=str(slot.dtype).removeprefix("torch."),
            shape=slot.shape,
            offset=slot.offset,
            nbytes=slot.nbytes,
            checksum=checksums[slot.name],
        )
        for slot in slots
    ]


def view(flat: torch.Tensor, meta: ParamMeta) -> torch.Tensor:
    """A published parameter where it lies in `flat`. Raises SyncError when it would lie outside."""
    if meta.offset < 0 or meta.offset + meta.nbytes > flat.numel():
        raise SyncError(f"{meta.name} lies outside of the published memory")
    return flat[meta.offset : meta.offset + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


Sums = tuple[torch.Tensor, torch.Tensor]
"""Of each slot its checksum, int64 [n, 2], and a number that is finite if all of its values are, float32 [n]."""


def _place(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    return flat[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).view(slot.shape)


def _copy_near(flat: torch.Tensor, tensors: dict[str, torch.Tensor], slots: list[Slot]) -> Sums:
    """In blocks, so that the second reading finds each in the cache."""
    sums, totals = [], []
    for slot in slots:
        source, target = as_matrix(tensors[slot.name].detach()), as_matrix(_place(flat, slot))
        margins = Margins(*target.shape, device=target.device)
        total = torch.zeros((), dtype=torch.float32, device=target.device)
        for row, block in blocks(target):
            block.copy_(source[row : row + block.shape[0]])
            margins.add(block, row=row)
            total += _total(block)
        sums.append(margins.sums())
        totals.append(total)
    return torch.stack(sums), torch.stack(totals)


def _copy_far(flat: torch.Tensor, tensors: dict[str, torch.Tensor], slots: list[Slot]) -> Sums:
    """Once over the link, after a GPU has read what it holds: those of one shape together, for a model has hundreds of
    tensors and few shapes."""
    sums: dict[str, torch.Tensor] = {}
    totals: dict[str, torch.Tensor] = {}
    for group in _alike(slots):
        sources = [tensors[slot.name].detach().to(slot.dtype) for slot in group]
        for slot, source in zip(group, sources, strict=True):
            _place(flat, slot).copy_(source, non_blocking=True)  # what is pinned is waited for with the sums
        if len(group) > 1:
            stack = torch.stack([as_matrix(source) for source in sources])
            found, total = sums_of(stack), _total(stack.flatten(1), dim=1)
        else:
            found, total = margins_of(sources[0]).sums().unsqueeze(0), _total(sources[0]).unsqueeze(0)
        names = [slot.name for slot in group]
        sums |= zip(names, found, strict=True)
        totals |= zip(names, total, strict=True)
    return torch.stack([sums[slot.name] for slot in slots]), torch.stack([totals[slot.name] for slot in slots])


def _alike(slots: list[Slot]) -> list[list[Slot]]:
    """Slots of one type and shape, as many together as are summed at once."""
    groups: list[list[Slot]] = []
    for slot in sorted(slots, key=lambda slot: (str(slot.dtype), slot.shape)):
        like = groups and (groups[-1][0].dtype, groups[-1][0].shape) == (slot.dtype, slot.shape)
        if like and fits_stack((len(groups[-1]) + 1) * slot.nbytes // slot.dtype.itemsize):
            groups[-1].append(slot)
        else:
            groups.append([slot])
    return groups


def _total(values: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    if not values.is_floating_point():
        return torch.zeros(values.shape[:dim] if dim else (), dtype=torch.float32, device=values.device)
    return values.sum(dim, dtype=torch.float32)
