"""Where the seconds of a phase went: engine, trainer, or the pipeline itself."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """Seconds by kind of work. Kinds: `engine_start`, `engine` (generation, scoring, capture), `trainer`, `sync`
    (pause, transfer, finalize), `quantize`. Spans of one kind must not overlap; what no span covers is overhead."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[kind] += time.monotonic() - start
