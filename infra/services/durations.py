"""How long each task usually takes on this machine, for each target, and seconds in words."""

import functools
import inspect
import json
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from infra.services.home import home

KEPT = 5
MEASURED = Path(__file__).with_name("durations.toml")

_target: ContextVar[str] = ContextVar("target", default="")


@contextmanager
def of_target(name: str) -> Iterator[None]:
    """Tasks called inside work on target `name`: their seconds are kept, and told, apart from those of others."""
    token = _target.set(name)
    try:
        yield
    finally:
        _target.reset(token)


def usual(task: str, target: str) -> float | None:
    """Median seconds of the last few completed calls of `task` for `target` here; before the first, those measured for
    the targets of the presets elsewhere (`durations.toml`), or None."""
    path = _path(task, target)
    kept = path.read_text().splitlines()[-KEPT:] if path.is_file() else []
    if kept:  # a file is empty for a moment when the first call has ended
        return statistics.median(json.loads(line) for line in kept)
    return measured(target).get(task)


def measured(target: str) -> dict[str, float]:
    """Seconds by task, and of the flow `loop`, measured once for the preset of that name; empty for other targets."""
    return tomllib.loads(MEASURED.read_text()).get(target, {})


def words(seconds: float) -> str:
    """Seconds as people say them: 8 s, 2 min 05 s, 1 h 03 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


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
    path = _path(name, _target.get())
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(f"{time.monotonic() - start:.3f}\n")


def _path(task: str, target: str) -> Path:
    return home() / "durations" / (target or "-") / task.replace("/", "-")
