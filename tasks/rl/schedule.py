"""When the rollouts of a step may begin: as early as the staleness bound allows, never earlier."""

import asyncio
from collections.abc import Awaitable, Callable

from tasks.rl.rollout import Group


class Schedule:
    """Rollouts of steps `first` to `last - 1`, begun as versions are published.

    Version v is what the trainer has after v steps, and step t is trained by version t. The rollouts of step t begin
    once version t - `max_staleness` is in the engines, so no token of them is older than that; with 0 they begin when
    step t - 1 has been trained and synced. sample: makes the rollouts of a step.
    """

    def __init__(
        self, sample: Callable[[int], Awaitable[list[Group]]], first: int, last: int, max_staleness: int
    ) -> None:
        self._sample, self._last, self._max_staleness = sample, last, max_staleness
        self._next = first
        self._running: dict[int, asyncio.Task[list[Group]]] = {}

    async def __aenter__(self) -> "Schedule":
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def published(self, version: int) -> None:
        """The engines have the weights of `version`: begin what that allows, in the order of steps."""
        while self._next < self._last and self._next - self._max_staleness <= version:
            self._running[self._next] = asyncio.ensure_future(self._sample(self._next))
            self._next += 1

    async def rollouts(self, step: int) -> list[Group]:
        """The rollouts of `step`, when all have finished."""
        return await self._running.pop(step)
