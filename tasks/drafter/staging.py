"""Between the thread that makes batches, the GPU that learns from them, and who reads what it computed: none waits for
more than it needs."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch


class Staging:
    """Moves batches to `device`, on a GPU through a stream of its own, while the GPU computes."""

    def __init__(self, device: str):
        self.device = device
        self._computing = torch.cuda.current_stream() if device == "cuda" else None
        self._stream = torch.cuda.Stream() if device == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """`batch.to(device)`, once it is there."""
        if self._stream is None:
            return batch.to(self.device)
        with torch.cuda.stream(self._stream):
            moved = batch.to(self.device)
        self._stream.synchronize()
        for tensor in _tensors(moved):
            tensor.record_stream(self._computing)  # its memory is not used again before what reads it has run
        return moved


@dataclass(frozen=True)
class Told:
    """Numbers on their way from a device. What is launched after them is not waited for."""

    values: torch.Tensor
    there: "torch.cuda.Event | None"

    @classmethod
    def of(cls, *values: torch.Tensor) -> "Told":
        """Of single numbers of one device."""
        stacked = torch.stack([value.detach().float() for value in values])
        if not stacked.is_cuda:
            return cls(stacked, None)
        coming = stacked.to("cpu", non_blocking=True)
        there = torch.cuda.Event()
        there.record()
        return cls(coming, there)

    def read(self) -> list[float]:
        """The numbers, waiting for them."""
        if self.there is not None:
            self.there.synchronize()
        return self.values.tolist()


class Ready(NamedTuple):
    """A rank's part of a pack: its batch on the device, how many rows of it count, and how many the loss reads."""

    batch: Any
    rows: int
    trained: int


class Step(NamedTuple):
    """A step that was begun: its number, learning rate, and (loss, gradient norm before clipping) once computed."""

    number: int
    lr: float
    told: Told


def _tensors(of: Any) -> Iterator[torch.Tensor]:
    if isinstance(of, torch.Tensor):
        yield of
    elif is_dataclass(of):
        for each in fields(of):
            yield from _tensors(getattr(of, each.name))
    elif isinstance(of, list):
        for one in of:
            yield from _tensors(one)
