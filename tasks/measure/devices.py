"""GPUs of a measurement: the first for the trainer and engines beside it, the second for an engine that it sends to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus() -> int:
    """How many this process may use."""
    import torch

    return torch.cuda.device_count()


@contextmanager
def second_gpu() -> Iterator[None]:
    """Processes that are started inside see only the second GPU; without GPUs nothing changes."""
    before = os.environ.get(_VISIBLE)
    if gpus() < 2:
        yield
        return
    os.environ[_VISIBLE] = before.split(",")[1] if before else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before
