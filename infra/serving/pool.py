"""The replicas of one release: started, watched, replaced when they die, stopped."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import urlsplit

from pydantic import SecretStr

from infra.cluster.placement import PlacementError, Resources, of_replica
from infra.cluster.session import session
from infra.engine.client import EngineClient
from infra.engine.errors import EngineError
from infra.engine.spec import EngineHandle, EngineSpec
from infra.serving.counters import Counters, of_engine
from infra.serving.state import PoolState, Triple
from infra.store.base import StoreError
from infra.store.open import open_store

POLL_S = 0.5
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0

_logger = logging.getLogger(__name__)


class Replica:
    """One engine. reserve: its devices. handle: how to reach it, None until it is ready."""

    def __init__(self, spec: EngineSpec, reserve: Resources) -> None:
        self._spec, self._reserve, self._stack = spec, reserve, ExitStack()
        self._starting: asyncio.Future | None = None
        self.handle: EngineHandle | None = None
        self.counters = Counters()
        self.heard = time.monotonic()

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises EngineError or PlacementError."""
        engine = session().engine(self._spec, reserve=self._reserve, progress=_logger.info)
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._stack.enter_context, engine))
        self.handle = await asyncio.shield(self._starting)
        self.heard = time.monotonic()

    async def stop(self) -> None:
        """End it, also while it starts. May be called again."""
        if self._starting:  # a thread cannot be interrupted
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(self._stack.close)

    async def look(self, silent_s: float) -> bool:
        """Whether it lives and has answered within `silent_s`; reads its counters."""
        if not await asyncio.to_thread(session().alive, self.handle):
            return False
        try:
            async with EngineClient(self.handle, timeout_s=silent_s) as client:
                self.counters = of_engine(await client.metrics())
            self.heard = time.monotonic()
        except EngineError:  # busy, or dying: the next looks will tell
            return time.monotonic() - self.heard < silent_s
        return True

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.handle.url)
        return parts.hostname, parts.port


class Pool:
    """`count` replicas of `triple`, kept up by a task for each until `close`."""

    def __init__(self, triple: Triple, count: int, key: str, silent_s: float, changed: Callable[[], None]) -> None:
        """key: that opens every replica. changed: called when a replica comes or goes."""
        self.triple = triple
        self._spec = triple.spec.model_copy(update={"key": SecretStr(key)})
        self._reserve = of_replica(self._spec.config, count, session().resources())
        self._silent_s, self._changed = silent_s, changed
        self._live: list[Replica | None] = [None] * count
        self._was: list[tuple[str, int]] = []
        self._ever: set[int] = set()
        self._past = Counters()
        self.problem, self.restarts = "", 0
        self.envoy = Counters()
        self._keepers = [asyncio.create_task(self._keep(i)) for i in range(count)]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of the replicas that are ready; of those that were last, while none is."""
        live = [r.address for r in self._live if r]
        self._was = live or self._was
        return self._was

    @property
    def ready(self) -> int:
        return sum(r is not None for r in self._live)

    @property
    def ever_ready(self) -> bool:
        """Whether every replica has been ready once."""
        return len(self._ever) == len(self._live)

    def check(self) -> None:
        """Raise what no replica should: a fault of the fleet's own."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    def state(self) -> PoolState:
        """What it is now."""
        counters = self._past.plus(self.envoy)
        for replica in filter(None, self._live):
            counters = counters.plus(replica.counters)
        return PoolState(
            label=self.triple.label,
            ready=self.ready,
            ever_ready=self.ever_ready,
            restarts=self.restarts,
            problem=self.problem,
            counters=counters,
        )

    async def close(self) -> None:
        """Stop every replica."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, place: int) -> None:
        """Keep one replica up: its only owner."""
        backoff = BACKOFF_S
        while True:
            replica = Replica(self._spec, self._reserve)
            try:
                await asyncio.to_thread(_fetch, self.triple)
                await replica.start()
                backoff, self.problem = BACKOFF_S, ""
                self._live[place] = replica
                self._ever.add(place)
                self._changed()
                while await replica.look(self._silent_s):
                    await asyncio.sleep(POLL_S)
                self.restarts += 1
                _logger.warning("a replica of %s at %s has died or is silent", self.triple.label, replica.handle.url)
            except (EngineError, PlacementError, StoreError) as error:
                self.problem = str(error)
                _logger.error("a replica of %s does not start: %s", self.triple.label, error)
            finally:
                self._live[place] = None
                self._past = self._past.plus(replica.counters)
                self._changed()
                await asyncio.shield(asyncio.create_task(replica.stop()))
            if self.problem:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)


def _fetch(triple: Triple) -> None:
    """Have on this machine what the replicas load; they look themselves whether it is what lineage names. Raises
    StoreError."""
    store = open_store()
    for artifact in triple.artifacts:
        store.open(artifact)
