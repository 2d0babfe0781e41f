"""How far the sampling of each round is: for the line that people watch, and how long it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from infra.config.rl import RLConfig
from infra.services.progress import report

SHARE = 0.8
"""What of a step's progress is sampling, about."""


class Sampling:
    """Rounds by number, from 0."""

    def __init__(self, config: RLConfig):
        self._config = config
        self._times: dict[int, list[float]] = {}
        self._finished: dict[int, int] = {}
        self._awaited: int | None = None

    @contextmanager
    def awaited(self, step: int) -> Iterator[None]:
        """Inside, a step waits for its groups, and the line moves on with each that finishes."""
        self._awaited = step
        self._say(step)
        try:
            yield
        finally:
            self._awaited = None

    @contextmanager
    def group(self, number: int) -> Iterator[None]:
        """Inside, a group of round `number` is sampled and scored."""
        times = self._times.setdefault(number, [time.monotonic(), 0.0])
        yield
        times[1] = time.monotonic()
        self._finished[number] = self._finished.get(number, 0) + 1
        if number == self._awaited:
            self._say(number)

    def seconds(self, number: int) -> float:
        """From the beginning of a round to the end of its last group so far; NaN when none was sampled by this process.
        The round is forgotten."""
        self._finished.pop(number, None)
        first, last = self._times.pop(number, (float("nan"), float("nan")))
        return last - first

    def _say(self, step: int) -> None:
        rl = self._config
        share = min(1.0, self._finished.get(step, 0) / rl.prompts_per_step)
        line = f"step {step + 1} of {rl.steps}: sampling {rl.prompts_per_step * rl.group_size} answers"
        report(line, step + round(SHARE * share, 2), rl.steps)
