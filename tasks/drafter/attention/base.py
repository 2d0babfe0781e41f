"""What a way to compute attention offers, and what rows attend to."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Self

import torch


@dataclass
class Keys:
    """What a layer's rows attend to: key and value [rows, key heads, size] of step 0, and those [wanted, key heads,
    size] of the rows asked for of each later step."""

    first: tuple[torch.Tensor, torch.Tensor]
    own: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Attention(ABC):
    """Where the rows asked for of a pack find their keys. Laid out on CPU beforehand, then moved: nothing in a training
    step waits for a GPU to say how large something is."""

    @classmethod
    @abstractmethod
    def of(cls, document_ids: torch.Tensor, wanted: torch.Tensor) -> Self:
        """document_ids: [rows] ascending, from 0. wanted: rows asked for, ascending."""

    @abstractmethod
    def to(self, device: str) -> Self:
        """The same on `device`, without waiting for it."""

    @abstractmethod
    def attend(self, query: torch.Tensor, keys: Keys) -> torch.Tensor:
        """[wanted, heads, size] of the scaled queries [wanted, heads, size] of the rows asked for."""
