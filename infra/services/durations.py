"""How long each task usually takes on this machine."""

import functools
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.services.home import home

KEPT = 5


def usual(name: str) -> float | None:
    """Median seconds of the last few completed runs of task `name`, or None before the first."""
    path = _path(name)
    if not path.is_file():
        return None
    return statistics.median(json.loads(line) for line in path.read_text().splitlines()[-KEPT:])


def timed(name: str, fn: Callable) -> Callable:
    """`fn`, sync or async, with the seconds of every completed call kept for `usual`."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def run_async(*args, **kwargs):
            with _kept(name):
                return await fn(*args, **kwargs)

        return run_async

    @functools.wraps(fn)
    def run(*args, **kwargs):
        with _kept(name):
            return fn(*args, **kwargs)

    return run


@contextmanager
def _kept(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(f"{time.monotonic() - start:.3f}\n")


def _path(name: str) -> Path:
    return home() / "durations" / name.replace("/", "-")
