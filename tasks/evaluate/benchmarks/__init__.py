"""Sets of questions with verifiable answers, one module each."""

from tasks.evaluate.benchmarks.base import Benchmark

NAMES = ("capitals", "gsm8k", "hellaswag", "humaneval", "truthfulqa")


def benchmark(name: str) -> Benchmark:
    """The benchmark called `name`. Raises ValueError naming those that exist."""
    from importlib import import_module

    if name not in NAMES:
        raise ValueError(f"there is no benchmark {name!r}: use {', '.join(NAMES)}")
    return import_module(f"{__name__}.{name}")
