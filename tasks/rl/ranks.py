"""The processes of one trainer: who they are, and what they tell each other."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

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
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, values)
        return np.concatenate(found)

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks."""
        if self.world == 1:
            return values
        return self.gather(np.array([values], dtype=np.float64)).sum(axis=0).tolist()
