"""A drafter whose trained weights, their gradients and moments are spread over ranks (FSDP2)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from infra.cluster.ranks import Ranks


class Sharded(torch.nn.Module):
    """`model` as one unit: drafters are small, and what is frozen of them (the target's embedding and head) every rank
    has whole. What reads the weights runs inside a forward pass, of all ranks at once."""

    def __init__(self, model: torch.nn.Module, ranks: Ranks, device: str):
        super().__init__()
        self.model = model
        frozen = {p for p in model.parameters() if not p.requires_grad}
        fully_shard(self, mesh=init_device_mesh(device, (ranks.world,)), ignored_params=frozen)
        self.set_reduce_scatter_unused_params(True)  # a rank without work reads some weights and not others

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """`compute(model, *args)`."""
        return compute(self.model, *args)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Weights that stay whole meanwhile: ranks may then make different numbers of forward passes."""
        self.unshard()
        try:
            yield
        finally:
            self.reshard()


def share(lengths: list[int], ranks: Ranks) -> list[int]:
    """Which of so many sequences this rank computes: the longest first to whoever has least, in their order."""
    loads, mine = [0] * ranks.world, []
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        loads[rank] += lengths[place]
        if rank == ranks.rank:
            mine.append(place)
    return sorted(mine)
