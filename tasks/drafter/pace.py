"""How many requests an engine that only reads is sent at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TOKENS = 2**18
"""In flight at most, unless one request has more: four steps of an H200, of which one is computed and one is next."""
SHORTEST = 2**10
"""What a request counts at least: a server spends most of a millisecond on it, however short."""


class Pace:
    """Lets requests to an engine begin, in the order in which they ask.

    A server works in turns on all requests that it has: each stage (parsing, checking, encoding) of all that have come,
    then the next. Of hundreds at once the engine gets few until most of them are through, and when it has answered them
    it waits for as many new ones. Few at a time are taken in while it computes.
    """

    def __init__(self, concurrency: int) -> None:
        """concurrency: requests in flight at most, whatever their length."""
        self._concurrency = concurrency
        self._turn, self._ended = asyncio.Lock(), asyncio.Event()
        self._requests = self._tokens = 0

    @asynccontextmanager
    async def request(self, tokens: int) -> AsyncIterator[None]:
        """Wait until a request of so many tokens may begin; it ends with the context."""
        tokens = max(tokens, SHORTEST)
        async with self._turn:
            while self._requests == self._concurrency or (self._requests and self._tokens + tokens > TOKENS):
                self._ended.clear()
                await self._ended.wait()
            self._requests += 1
            self._tokens += tokens
        try:
            yield
        finally:
            self._requests -= 1
            self._tokens -= tokens
            self._ended.set()
