"""Put what is staged in the place of the old weights: all of it, or none."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from infra.transport.update import Staged

_BLOCK_BYTES = 2**28


def put_in_place(staged: Sequence[Staged], spare: dict[tuple[int, str], torch.Tensor]) -> None:
    """Exchange the model's weights for the staged ones. What fails half-way is undone before it is raised.

    On CPU references change hands. On a GPU, where graphs hold the parameters' addresses, values do: the old ones end
    up in the staged memory.
    spare: takes the memory of the old values, by module and attribute, for the next update.
    """
    undo: list[Callable[[], object]] = []
    try:
        for one in staged:
            _exchange(one, undo)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    for one in staged:
        if one.values is not None:
            spare[id(one.destination.module), one.destination.attribute] = one.values


def swap(held: torch.Tensor, other: torch.Tensor, undo: list[Callable[[], object]]) -> None:
    """Exchange the values of two tensors of one shape where they lie, with room for a block beside them. `undo` takes
    the way back of each block before it is exchanged."""
    held, other = torch.atleast_1d(held), torch.atleast_1d(other)
    rows = max(1, _BLOCK_BYTES // max(1, held[:1].nbytes))
    for ours, theirs in zip(held.split(rows), other.split(rows), strict=True):
        kept = ours.clone()
        undo.append(partial(swap, ours, theirs, []))
        ours.copy_(theirs)
        theirs.copy_(kept)


def _exchange(one: Staged, undo: list[Callable[[], object]]) -> None:
    """Swap what the model holds and what is staged; `undo` takes the way back of each step before it is made."""
    module, parameter = one.destination.module, one.destination.parameter
    if one.values is not None:
        old = parameter.data
        if parameter.device.type == "cpu":
            undo.append(partial(setattr, parameter, "data", old))
            parameter.data, one.values = one.values, old
        else:
            swap(old, one.values, undo)
    if one.kernel is not None:
        undo.append(partial(setattr, module, "cpu_linear", getattr(module, "cpu_linear", None)))
        module.cpu_linear = one.kernel
