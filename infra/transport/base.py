"""What every transport of weights has in common: what a trainer publishes, and how an update fails."""

from collections.abc import Iterable
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


class Sender(Protocol):
    """The trainer's side of a transport. As a context manager it is closed at the end."""

    def __enter__(self) -> "Sender": ...

    def __exit__(self, *_: object) -> None: ...

    def publish(self, version: int, named_tensors: Iterable[tuple[str, "torch.Tensor"]]) -> Published:
        """Make these weights available to engines as `version`; what was published before is gone."""
        ...

    def close(self) -> None:
        """Free what was published."""
        ...
