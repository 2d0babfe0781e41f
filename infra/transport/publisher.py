"""The part of a sender that does not depend on how weights travel."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Self

import torch

from infra.transport.base import SAME_HOST, ParamMeta, Published, Reach


class Publisher(ABC):
    """Base of the senders: who publishes, as what type, and what it published last."""

    transport: str

    def __init__(self, dtype: str | None = None, reach: Reach = SAME_HOST) -> None:
        """dtype: the engines' weight type, such as `bfloat16`; none publishes each tensor in its own."""
        self.dtype = getattr(torch, dtype) if dtype else None
        self.reach = reach
        self.sender, self._epoch = secrets.token_hex(8), time.time_ns()
        self._last: Published | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], engines: int = 1
    ) -> Published: ...

    @abstractmethod
    def close(self) -> None: ...

    def offer(self, engines: int) -> Published:
        """The version published last: any number of engines may read it."""
        return self._last

    def _announce(self, version: int, location: str, params: list[ParamMeta], started: float) -> Published:
        """started: `time.monotonic()` when the publication began."""
        self._last = Published(
            transport=self.transport,
            version=version,
            sender=self.sender,
            sender_epoch=self._epoch,
            location=location,
            params=params,
            publish_s=time.monotonic() - started,
        )
        return self._last
