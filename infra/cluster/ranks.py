"""The processes of one trainer: who they are, what they tell each other, and how they hold a tensor between them."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

TIMEOUT = timedelta(minutes=10)
"""A rank that waits longer for the others has lost one."""


@dataclass(frozen=True)
class Ranks:
    """rank: of `world`, from 0. Collective calls, which every rank makes in the same order, are free with one rank."""

    rank: int = 0
    world: int = 1

    def connect(self, store: dist.Store) -> None:
        """Form the process group: NCCL between GPUs, gloo between CPUs."""
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=TIMEOUT)

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, one after the other."""
        if self.world == 1:
            return values
        return np.concatenate(self.collect(values))

    def collect(self, value: Any) -> list[Any]:
        """What each rank brings, in their order."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks."""
        if self.world == 1:
            return values
        return self.gather(np.array([values], dtype=np.float64)).sum(axis=0).tolist()


class Meeting:
    """Where the other ranks find the first one, which makes this. address: host and port."""

    def __init__(self) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self.store.port}"

    @staticmethod
    def at(address: str) -> dist.Store:
        """What another rank connects to."""
        host, _, port = address.rpartition(":")
        return dist.TCPStore(host, int(port), is_master=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that ranks hold together. A collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank has, held as `like` is."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
