"""What every transport of weights has in common: what a trainer publishes, and how an update fails."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch


class SyncError(RuntimeError):
    """A weight update that did not happen, or that an engine may not serve. The message names engine and parameter."""


class ParamMeta(BaseModel):
    """One published parameter.

    name: as in the Hugging Face model's `named_parameters()`.
    dtype: torch's name without `torch.`, such as `float32`.
    offset, nbytes: where its bytes lie in the published memory (row-major).
    checksum: `infra.transport.checksum` of its values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    checksum: str


class Published(BaseModel):
    """One version of a model's weights, ready to be fetched by engines.

    transport: name of the transport that published it.
    version: integer that grows with every update of one sender.
    sender: identity of the sender; versions of different senders are not comparable.
    sender_epoch: when the sender was made, nanoseconds since 1970; an engine that follows a sender refuses older ones.
    location: where the transport's receiving side finds the bytes.
    publish_s: seconds the sender took to copy and checksum them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: str
    version: int
    sender: str
    sender_epoch: int
    location: str
    params: list[ParamMeta]
    publish_s: float

    @property
    def bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.nbytes for p in self.params)


@dataclass(frozen=True)
class Reach:
    """Whom a sender sends to.

    folder: shared by trainer and engines, or `s3://bucket/prefix`; only the `store` transport needs one.
    stall_s: a transfer that makes no progress for so many seconds is given up, on both sides.
    """

    folder: Path | str | None = None
    stall_s: float = 30.0


SAME_HOST = Reach()


class Sender(Protocol):
    """The trainer's side of a transport. As a context manager it is closed at the end."""

    def __enter__(self) -> "Sender": ...

    def __exit__(self, *_: object) -> None: ...

    def publish(self, version: int, named_tensors: Iterable[tuple[str, "torch.Tensor"]], engines: int = 1) -> Published:
        """Make these weights available to engines as `version`; what was published before is gone.

        engines: how many take it together, which only a broadcast asks.
        Raises SyncError when a tensor holds values that are not finite.
        """
        ...

    def offer(self, engines: int) -> Published:
        """The version published last, for so many engines again: some were lost, or one has joined."""
        ...

    def close(self) -> None:
        """Free what was published."""
        ...


Fetch = Callable[[ParamMeta], "torch.Tensor"]
"""A published parameter's values, on the host or the engine's device, valid while the source's context is open."""


class Source(Protocol):
    """The engine's side of a transport.

    lands: whether what is fetched lies in memory of the engine's own: giving it its model's form is no transfer then.
    """

    lands: bool

    def open(self, published: Published) -> AbstractContextManager[Fetch]:
        """Reach the published bytes. Leaving the context raises if they changed meanwhile.

        Raises SyncError with the cause, the sender's own where it is known.
        """
        ...

    def forget(self) -> None:
        """Let go of what is kept from version to version, and stop waiting for a sender. Any thread may call it, at any
        time."""
        ...
