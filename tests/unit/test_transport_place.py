import pytest
import torch
from torch import nn

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
