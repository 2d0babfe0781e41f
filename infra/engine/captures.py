"""Files of hidden states that a capture engine writes."""

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def load(path: Path) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(hidden_states [tokens, layers, hidden], token_ids [tokens]) of one request, waiting until the file is complete.

    The request's batch must have been flushed (`EngineClient.flush_captures`): the engine holds the lock until then.
    """
    from safetensors.torch import load_file

    with _lock_file(path).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        tensors = load_file(path)
    return tensors["hidden_states"], tensors["token_ids"]


def discard(path: Path) -> None:
    """Remove a request's file and its lock, as far as they exist."""
    path.unlink(missing_ok=True)
    _lock_file(path).unlink(missing_ok=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
