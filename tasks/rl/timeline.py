"""What each worker did when: the rows of the timeline picture."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timeline:
    """Seconds since it was made. Kinds: `rollout`, `train`, `sync`, `evaluate`, `checkpoint`; the rest is idle."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.rows: list[dict[str, float | str]] = []
        self._open: dict[tuple[str, str], tuple[int, float]] = {}

    @contextmanager
    def working(self, worker: str, kind: str) -> Iterator[None]:
        """Inside, `worker` does this; blocks of one worker and kind that overlap are one span."""
        key, now = (worker, kind), time.monotonic()
        count, since = self._open.get(key, (0, now))
        self._open[key] = count + 1, since
        try:
            yield
        finally:
            count, since = self._open.pop(key)
            if count > 1:
                self._open[key] = count - 1, since
            else:
                end = time.monotonic()
                self.rows.append(
                    {"worker": worker, "kind": kind, "start_s": since - self._start, "end_s": end - self._start}
                )
