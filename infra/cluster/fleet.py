"""The rollout engines of a run: probed, replaced when they die or hang, added and drained while requests run."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from infra.cluster.placement import PlacementError
from infra.cluster.turns import Turns
from infra.engine.client import EngineClient
from infra.engine.errors import EngineError, EngineGone
from infra.engine.spec import EngineHandle
from infra.transport.base import SyncError

T = TypeVar("T")

_FAILED_STARTS = 3
_ATTEMPTS = 8
_WORK = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")


@dataclass(eq=False)
class Engine:
    """One engine. number: the how manieth of the fleet, from 1. lost: done when it must not be used again."""

    number: int
    client: EngineClient
    stop: Callable[[], Awaitable[Any]]
    lost: asyncio.Future
    in_use: int = 0
    draining: bool = False
    done: float = -1.0
    moved: float = field(default_factory=time.monotonic)


class Fleet:
    """Engines to work on, any number of requests each; an async context manager.

    start: a context manager that is an engine while it is open; opened in a thread. capacity: requests that one engine
    is given at once. welcome: brings an engine that joins to the weights of the others; it serves nothing before.
    probe_s: seconds between probes. stuck_s: an engine that answers no probe, or that has requests and works on none,
    for so many seconds is replaced. told: called with a line when an engine is lost, joins or leaves.
    """

    def __init__(
        self,
        start: Callable[[], AbstractContextManager[EngineHandle]],
        *,
        capacity: int,
        welcome: Callable[[EngineClient], Awaitable[None]],
        told: Callable[[str], None],
        probe_s: float = 5.0,
        stuck_s: float = 120.0,
    ):
        self._start, self._capacity, self._welcome, self._told = start, capacity, welcome, told
        self._probe_s, self._stuck_s = probe_s, stuck_s
        self.clients: list[EngineClient] = []
        """Of the engines that serve; the same list for as long as the fleet lives."""
        self.lost = self.retried = 0
        """Engines lost, and pieces of work done again for that."""
        self.wanted = 0
        self.refused: EngineError | PlacementError | SyncError | None = None
        """Why no more engines are started; until the next `resize`."""
        self._engines: list[Engine] = []
        self._count = 0
        self._joining: set[asyncio.Task] = set()
        self._leaving: set[asyncio.Task] = set()
        self._failures = 0
        self._changed = asyncio.Condition()
        self._turns = Turns()
        self._weights = asyncio.Lock()
        self._watching: asyncio.Task | None = None

    async def __aenter__(self) -> "Fleet":
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in [self._watching, *self._joining]:
            task.cancel()
        await asyncio.gather(self._watching, *self._joining, *self._leaving, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self._engines), return_exceptions=True)

    @property
    def engines(self) -> Sequence[Engine]:
        """Those that serve, the draining ones included."""
        return self._engines

    async def resize(self, count: int) -> None:
        """Want `count` engines: more are started, those beyond are drained of their requests and stopped. Returns at
        once."""
        self.wanted, self._failures, self.refused = count, 0, None
        await self._balance()

    async def ready(self) -> None:
        """Wait until all wanted engines serve. Raises what kept one from starting."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._open()) >= self.wanted or self.refused)
        if len(self._open()) < self.wanted:
            raise self.refused

    async def run(self, work: Callable[[Engine], Awaitable[T]], near: Engine | None = None) -> T:
        """Do `work` on an engine, and again on another when the engine is lost meanwhile.

        near: an engine whose cache helps; taken if it has room. Raises EngineError when no engine can be had.
        """
        for _ in range(_ATTEMPTS):
            async with self._slot(near) as engine:
                doing = asyncio.ensure_future(work(engine))
                try:
                    await asyncio.wait({doing, engine.lost}, return_when=asyncio.FIRST_COMPLETED)
                    if doing.done():
                        return doing.result()
                except EngineError as error:
                    if not await self._answers(engine):
                        await self._lose(engine, str(error))
                    elif not isinstance(error, EngineGone):  # it refuses; a connection that broke is tried again
                        raise
                finally:
                    doing.cancel()
            self.retried += 1
        raise EngineError(f"a rollout lost its engine {_ATTEMPTS} times in a row: see the engines' logs")

    async def nearest(self) -> Engine:
        """The engine with the least to do, to keep requests with one prompt together."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._open() or self._broken())
            if not self._open():
                raise EngineError(f"no engine is left to work on: {self._broken()}")
            return min(self._open(), key=lambda e: e.in_use)

    @asynccontextmanager
    async def weights(self) -> AsyncIterator[None]:
        """Inside, no engine joins: what `welcome` would give it is about to change."""
        async with self._weights:
            yield

    async def bury(self, engines: Sequence[Engine]) -> int:
        """Lose those that do not answer; how many."""
        alive = await asyncio.gather(*map(self._answers, engines))
        dead = [engine for engine, answers in zip(engines, alive, strict=True) if not answers]
        for engine in dead:
            await self._lose(engine, "it does not answer")
        return len(dead)

    # Engines come and go

    async def _balance(self) -> None:
        staying = [engine for engine in self._engines if not engine.draining]
        for engine in sorted(staying, key=lambda e: e.in_use)[: max(0, len(staying) - self.wanted)]:
            engine.draining = True
            self._told(f"engine {engine.number} is drained of {engine.in_use} requests")
        for engine in [e for e in self._engines if e.draining and not e.in_use]:
            await self._leave(engine, f"engine {engine.number} has left")
        if self.refused is None:
            for _ in range(self.wanted - len(self._open()) - len(self._joining)):
                task = asyncio.create_task(self._add())
                self._joining.add(task)
                task.add_done_callback(self._joining.discard)

    async def _add(self) -> None:
        opened, stack = self._start(), AsyncExitStack()
        starting = asyncio.ensure_future(asyncio.to_thread(opened.__enter__))
        try:
            handle = await asyncio.shield(starting)
            stack.push_async_callback(asyncio.to_thread, opened.__exit__, None, None, None)
            await self._join(handle, stack)
        except (EngineError, PlacementError, SyncError) as error:
            await stack.aclose()
            self._failures += 1
            if isinstance(error, PlacementError) or self._failures >= _FAILED_STARTS or not self._count:
                self.refused = error
            self._joining.discard(asyncio.current_task())  # before those who wait for it look again
            self._told(f"an engine could not join: {error}")
            await self._tell_all()
        except asyncio.CancelledError:
            if not starting.done():  # a thread cannot be cancelled: what it starts is stopped
                await asyncio.wait({starting})
                if starting.exception() is None:
                    stack.push_async_callback(asyncio.to_thread, opened.__exit__, None, None, None)
            await stack.aclose()
            raise

    async def _join(self, handle: EngineHandle, stack: AsyncExitStack) -> None:
        client = await stack.enter_async_context(EngineClient(handle))
        async with self._weights:
            await self._welcome(client)
            self._count += 1
            engine = Engine(self._count, client, stack.aclose, asyncio.get_running_loop().create_future())
            self._engines.append(engine)
            self.clients.append(client)
        self._failures = 0
        self._told(f"engine {engine.number} serves")
        await self._tell_all()

    async def _lose(self, engine: Engine, why: str) -> None:
        if engine in self._engines:
            self.lost += 1
            await self._leave(engine, f"engine {engine.number} is lost: {why}")

    async def _leave(self, engine: Engine, line: str) -> None:
        if engine not in self._engines:  # it has left while this was about to be said
            return
        self._engines.remove(engine)
        self.clients.remove(engine.client)
        engine.lost.set_result(None)
        task = asyncio.ensure_future(engine.stop())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._told(line)
        await self._tell_all()

    # Work

    def _open(self) -> list[Engine]:
        return [engine for engine in self._engines if not engine.draining]

    def _broken(self) -> Exception | None:
        """Why no engine will ever serve again."""
        return self.refused if not self._open() and not self._joining else None

    @asynccontextmanager
    async def _slot(self, near: Engine | None) -> AsyncIterator[Engine]:
        again = False
        while (engine := self._free(near)) is None:
            if self._broken():
                raise EngineError(f"no engine is left to work on: {self._broken()}")
            await self._turns.wait(again=again)
            again = True
        engine.in_use += 1
        try:
            yield engine
        finally:
            engine.in_use -= 1
            self._turns.let_in()

    def _free(self, near: Engine | None) -> Engine | None:
        """`near` if it has room, else the engine with the most room, if any has."""
        free = [engine for engine in self._open() if engine.in_use < self._capacity]
        return near if near in free else min(free, key=lambda e: e.in_use, default=None)

    async def _tell_all(self) -> None:
        """Engines have come or gone: everybody who waits looks again."""
        self._turns.let_all_in()
        async with self._changed:
            self._changed.notify_all()

    # Health

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._probe_s)
            for engine in list(self._engines):
                if not engine.lost.done():  # while another was probed
                    await self._probe(engine)
            await self._balance()

    async def _probe(self, engine: Engine) -> None:
        try:
            if not await asyncio.wait_for(engine.client.is_healthy(), self._probe_s):
                raise EngineGone("its server says that the engine behind it has died")
            samples = await asyncio.wait_for(engine.client.metrics(), self._probe_s)
        except EngineGone as error:
            await self._lose(engine, str(error))
            return
        except (TimeoutError, EngineError):
            samples = None
        now = time.monotonic()
        if samples is not None:
            done = sum(value for name, value in samples.items() if name.startswith(_WORK))
            if not engine.in_use or done != engine.done or self._weights.locked():
                engine.done, engine.moved = done, now
        if now - engine.moved > self._stuck_s:
            what = "it answers nothing" if samples is None else "it has requests and works on none"
            await self._lose(engine, f"{what} for {self._stuck_s:g} s")

    async def _answers(self, engine: Engine) -> bool:
        if engine.lost.done():
            return False
        try:
            return await asyncio.wait_for(engine.client.is_healthy(), self._probe_s)
        except (TimeoutError, EngineError):
            return False
