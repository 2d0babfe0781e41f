"""Files of hidden states that a capture engine writes."""

import fcntl
import time
from pathlib import Path
from typing import TYPE_CHECKING

from infra.engine.errors import EngineError

if TYPE_CHECKING:
    import torch


def load(path: Path, timeout_s: float = 60.0) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(hidden_states [tokens, layers, hidden] in the engine's dtype, token_ids [tokens] int64) of one request.

    Waits until the file is complete, which the engine begins when it reads on: it must have other requests, or be given
    a step (`EngineClient.flush_captures`).
    Raises EngineError when the engine has not written it within `timeout_s` or was stopped before it did.
    """
    from safetensors.torch import load_file

    _wait_until_written(path, time.monotonic() + timeout_s)
    if not path.is_file():
        raise EngineError(f"the engine did not write {path}: see its log")
    tensors = load_file(path)
    return tensors["hidden_states"], tensors["token_ids"]


def discard(path: Path) -> None:
    """Remove a request's file and its lock, as far as they exist."""
    path.unlink(missing_ok=True)
    _lock_file(path).unlink(missing_ok=True)


def _wait_until_written(path: Path, deadline: float) -> None:
    """The engine holds the lock from before the answer until the file is complete, or until it dies."""
    with _lock_file(path).open() as lock:
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineError(f"{path} is still unwritten: call flush_captures first") from None
                time.sleep(0.01)


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
