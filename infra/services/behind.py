"""Work that need not be waited for, yet must be done."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Behind:
    """A context in which calls are made one after the other by a thread of their own. It ends when all are done.

    What a call raises is raised by the next one that is asked for, or by the end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._asked: list[Future] = []

    def __enter__(self) -> "Behind":
        return self

    def __call__(self, function: Callable, *args, **kwargs) -> None:
        """Have `function(*args, **kwargs)` called."""
        while self._asked and self._asked[0].done():
            self._asked.pop(0).result()
        self._asked.append(self._thread.submit(function, *args, **kwargs))

    def __exit__(self, failed, *_) -> None:
        self._thread.shutdown()
        if failed is None:
            for asked in self._asked:
                asked.result()
