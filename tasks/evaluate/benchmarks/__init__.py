"""Sets of questions with verifiable answers, one module each."""

from tasks.evaluate.benchmarks.base import Benchmark

NAMES = ("bfcl", "capitals", "gsm8k", "hellaswag", "humaneval", "truthfulqa")


class BenchmarkError(ValueError):
    """A benchmark that does not exist."""


def benchmark(name: str) -> Benchmark:
    """The benchmark called `name`. Raises BenchmarkError naming those that exist."""
    from importlib import import_module

    if name not in NAMES:
        raise BenchmarkError(f"there is no benchmark {name!r}: use {', '.join(NAMES)}")
    return import_module(f"{__name__}.{name}")
