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

    Waits for the file, and raises, as `wait` does.
    """
    from safetensors.torch import load_file

    wait(path, timeout_s)
    tensors = load_file(path)
    return tensors["hidden_states"], tensors["token_ids"]


def wait(path: Path, timeout_s: float = 60.0) -> None:
    """Until the file is complete. The engine begins it when it reads on: it must have other requests, or be given a
    step (`EngineClient.flush_captures`). It holds the lock from before the answer until the file is complete, or it
    dies.

    Raises EngineError when the engine has not written it within `timeout_s` or was stopped before it did.
    """
    deadline = time.monotonic() + timeout_s
    with _lock_file(path).open() as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineError(f"{path} is still unwritten: call flush_captures first") from None
                time.sleep(0.01)
    if not path.is_file():
        raise EngineError(f"the engine did not write {path}: see its log")


def discard(path: Path) -> None:
    """Remove a request's file and its lock, as far as they exist."""
    path.unlink(missing_ok=True)
    _lock_file(path).unlink(missing_ok=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
