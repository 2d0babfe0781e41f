import pytest
import torch
from torch import nn

from infra.transport import place
from infra.transport.layout import Destination
from infra.transport.place import put_in_place
from infra.transport.update import Staged


class Full(nn.Linear):
    """Has room for no kernel."""

    def __setattr__(self, name, value):
        if name == "cpu_linear" and callable(value):
            raise RuntimeError("no room")
        super().__setattr__(name, value)


def staged(layer: nn.Linear, value: float) -> Staged:
    destination = Destination(layer, "weight", tuple(layer.weight.shape), torch.float32)
    return Staged(destination, values=torch.full_like(layer.weight.data, value), kernel=lambda x, w, b: value)


@pytest.fixture
def layers() -> list[nn.Linear]:
    made = [nn.Linear(3, 2, bias=False) for _ in range(3)]
    for i, layer in enumerate(made):
        layer.weight.data.fill_(i)
        layer.cpu_linear = i
    return made


def test_everything_changes_and_the_old_memory_is_kept_for_the_next_update(layers):
    spare, old = {}, [layer.weight.data_ptr() for layer in layers]
    put_in_place([staged(layer, 9.0) for layer in layers], spare)
    assert all((layer.weight == 9).all() and callable(layer.cpu_linear) for layer in layers)
    assert [spare[id(layer), "weight"].data_ptr() for layer in layers] == old


def test_what_fails_half_way_is_undone(layers):
    spare = {}
    updates = [staged(layer, 9.0) for layer in layers]
    layers[1].__class__ = Full
    with pytest.raises(RuntimeError, match="no room"):
        put_in_place(updates, spare)
    assert all((layer.weight == i).all() and layer.cpu_linear == i for i, layer in enumerate(layers)) and not spare


def test_values_are_exchanged_where_they_lie_and_back(monkeypatch):
    monkeypatch.setattr(place, "_BLOCK_BYTES", 48)  # two rows
    undo, held, other = [], torch.arange(30.0).view(5, 6), -torch.arange(30.0).view(5, 6)
    first, second, addresses = held.clone(), other.clone(), (held.data_ptr(), other.data_ptr())
    place.swap(held, other, undo)
    assert torch.equal(held, second) and torch.equal(other, first) and len(undo) == 3
    for step in reversed(undo):
        step()
    assert torch.equal(held, first) and torch.equal(other, second)
    assert (held.data_ptr(), other.data_ptr()) == addresses
    scalar, one = torch.tensor(1.0), torch.tensor(2.0)
    place.swap(scalar, one, [])
    assert (scalar, one) == (2, 1)
