"""Put what is staged in the place of the old weights: all of it, or none."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from infra.transport.update import Staged


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


def _exchange(one: Staged, undo: list[Callable[[], object]]) -> None:
    """Swap what the model holds and what is staged; `undo` takes the way back of each step before it is made."""
    module, parameter = one.destination.module, one.destination.parameter
    if one.values is not None:
        old = parameter.data
        if parameter.device.type == "cpu":
            undo.append(partial(setattr, parameter, "data", old))
            parameter.data, one.values = one.values, old
        else:
            old = old.clone()
            undo.append(partial(parameter.data.copy_, old))
            parameter.data.copy_(one.values)
            one.values.copy_(old)
    if one.kernel is not None:
        undo.append(partial(setattr, module, "cpu_linear", getattr(module, "cpu_linear", None)))
        module.cpu_linear = one.kernel
