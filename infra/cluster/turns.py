"""A queue at a door: who waits is let in one at a time, so that a slot that becomes free wakes one of the thousands
that may wait for it, not all of them."""

import asyncio
from collections import deque


class Turns:
    """Of one event loop. Whoever came first is let in first."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self, *, again: bool = False) -> None:
        """Until let in. again: one that was let in and found nothing goes first."""
        turn = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if again else self._waiting.append)(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was let in already: the next one takes its turn
                self.let_in()
            raise

    def let_in(self) -> None:
        """The first one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def let_all_in(self) -> None:
        """Everyone who waits now."""
        for _ in range(len(self._waiting)):
            self.let_in()
