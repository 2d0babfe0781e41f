"""The transports by name: one line each, and one file with its two sides."""

from importlib import import_module
from typing import TYPE_CHECKING

from infra.transport.base import Reach, Sender, Source

if TYPE_CHECKING:
    import torch

# Module, sender's class, source's class.
TRANSPORTS = {
    "shm": ("infra.transport.shm", "ShmSender", "ShmSource"),
    "ipc": ("infra.transport.ipc", "IpcSender", "IpcSource"),
    "nccl": ("infra.transport.nccl", "NcclSender", "NcclSource"),
    "store": ("infra.transport.store", "StoreSender", "StoreSource"),
}


def make_sender(transport: str, dtype: str | None, reach: Reach) -> Sender:
    """The trainer's side of `transport`.

    dtype: the engines' weight type, such as `bfloat16`; none publishes each tensor in its own.
    Raises ValueError for a transport that is not known.
    """
    return _load(transport, 1)(dtype, reach)


def make_source(transport: str, device: "torch.device") -> Source:
    """The engine's side of `transport`, for a model on `device`. Raises ValueError for one that is not known."""
    return _load(transport, 2)(device)


def _load(transport: str, side: int) -> type:
    if transport not in TRANSPORTS:
        raise ValueError(f"transport {transport!r} is not known: use {', '.join(TRANSPORTS)}")
    names = TRANSPORTS[transport]
    return getattr(import_module(names[0]), names[side])
