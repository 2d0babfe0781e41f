"""The transports by name: one line each."""

from importlib import import_module

from infra.transport.base import Sender

SENDERS = {
    "shm": ("infra.transport.shm", "ShmSender"),
}


def make_sender(transport: str, dtype: str) -> Sender:
    """The trainer's side of `transport`, publishing weights as `dtype`, such as `bfloat16`.

    Raises ValueError for a transport that is not known.
    """
    if transport not in SENDERS:
        raise ValueError(f"transport {transport!r} is not known: use {', '.join(SENDERS)}")
    module, name = SENDERS[transport]
    return getattr(import_module(module), name)(dtype)
