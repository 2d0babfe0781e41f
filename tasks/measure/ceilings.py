"""The plainest copy of as many bytes over the link that a transport takes, in the same run: what it could reach."""

import secrets
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from tasks.measure.broadcast import broadcast_s

PIECE = 2**30
"""What is read, or copied to a GPU, bytes at most: larger versions take so many times as long. Far more than caches
hold; a GPU has no room for two more copies of a large model."""


class Ceiling(NamedTuple):
    """seconds: of all bytes, median. what: they did."""

    seconds: float
    what: str


def ceiling(transport: str, nbytes: int, repeats: int, folder: str) -> Ceiling:
    """The plainest way for the bytes of `transport`. folder: where its versions lie, if it is `store`."""
    from infra.engine.pin import accelerated

    if transport == "nccl":
        return Ceiling(broadcast_s(nbytes, repeats), "one tensor broadcast")
    if transport == "store":
        return Ceiling(read_s(nbytes, repeats, folder), "one file read")
    if not accelerated():
        return Ceiling(copy_s(nbytes, repeats, "cpu", "cpu"), "copy in memory")
    if transport == "ipc":
        return Ceiling(copy_s(nbytes, repeats, "cuda", "cuda"), "copy on the GPU")
    return Ceiling(copy_s(nbytes, repeats, "cpu", "cuda"), "copy from host to GPU")


def copy_s(nbytes: int, repeats: int, here: str, there: str) -> float:
    """Seconds of one copy between two arrays that have been touched before, on the devices named."""
    import torch

    size = nbytes if there == "cpu" else min(nbytes, PIECE)
    source = torch.ones(size, dtype=torch.uint8, device=here, pin_memory=(here, there) == ("cpu", "cuda"))
    target = torch.zeros(size, dtype=torch.uint8, device=there)

    def copy() -> None:
        target.copy_(source)
        if there == "cuda":
            torch.cuda.synchronize()

    return _median(copy, repeats) * nbytes / size


def read_s(nbytes: int, repeats: int, folder: str) -> float:
    """Seconds of reading as many bytes of one file, by one thread, into memory that has been touched before."""
    import numpy as np

    from infra.transport.shelf import open_shelf

    size = min(nbytes, PIECE)
    target = np.ones(size, dtype=np.uint8)
    shelf = open_shelf(f"{folder}/plain-{secrets.token_hex(4)}")

    def read() -> None:
        done, memory = 0, memoryview(target)
        with shelf.open(0, "bytes") as file:
            while count := file.readinto(memory[done:]):
                done += count

    try:
        shelf.begin(0)
        shelf.put(0, "bytes", [memoryview(np.random.default_rng(0).bytes(size))])
        shelf.commit(0, "{}")
        return _median(read, repeats) * nbytes / size
    finally:
        shelf.clear()


def _median(do: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        started = time.monotonic()
        do()
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds[1:])
