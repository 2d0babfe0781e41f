"""The rollout engines of one run: as many as were asked for last, all with the weights that were sent last."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from infra.cluster.control import Control
from infra.cluster.fleet import Engine, Fleet
from infra.cluster.placement import Resources
from infra.cluster.session import session
from infra.config.flows import RLFlowConfig
from infra.engine.client import EngineClient
from infra.engine.errors import EngineError
from infra.engine.spec import EngineSpec, Role, Speculation
from infra.services.progress import report
from infra.transport.base import Published, SyncError
from infra.transport.sync import SyncReport, sync

Offer = Callable[[int], Awaitable[Published]]

OBEY_S = 1.0
"""How often a run looks whether it was asked for more or fewer engines, seconds."""


class RolloutEngines:
    """Async context manager. base: the model they start with. folder: of the run. reserve: devices of each engine.

    fleet: where work is done. Entering starts them and returns at once. updating(engine): a context in which an engine
    takes new weights. sleep_level: what `rest` frees, 0 nothing.
    """

    def __init__(
        self,
        base: Path,
        config: RLFlowConfig,
        folder: Path,
        reserve: Resources,
        updating: Callable[[Engine], AbstractContextManager],
        speculation: Speculation | None = None,
        sleep_level: int = 0,
    ):
        self._config, self._control, self._updating = config, Control(folder), updating
        self._sleep_level, self._asleep = sleep_level, False
        self._lines: list[str] = []
        self._offer: Offer | None = None
        spec = EngineSpec(
            model=base,
            role=Role.rollout,
            config=config.engine,
            speculation=speculation,
            seed=config.rl.seed,
            matched=config.rl.numerics == "matched",
        )
        self.fleet = Fleet(
            partial(session().engine, spec, reserve=reserve, progress=report),
            capacity=config.engine.max_concurrent_sequences,
            welcome=self._welcome,
            told=self._tell,
            probe_s=config.cluster.probe_s,
            stuck_s=config.cluster.stuck_s,
        )

    async def __aenter__(self) -> "RolloutEngines":
        await self.fleet.__aenter__()
        await self.fleet.resize(self._control.wanted() or self._config.cluster.engines)
        self._obeying = asyncio.create_task(self._obey())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._obeying.cancel()
        await asyncio.gather(self._obeying, return_exceptions=True)
        await self.fleet.__aexit__(*error)

    async def rest(self) -> None:
        """Let the engines free their memory for the trainer. They have nothing to do; the next version wakes them."""
        if self._sleep_level:
            async with self.fleet.weights():
                self._asleep = True
                await asyncio.gather(*(client.sleep(self._sleep_level) for client in self.fleet.clients))

    async def send(self, publish: Offer, again: Offer) -> tuple[Published, SyncReport | None]:
        """Publish a version and bring all engines to it; those that join later start from it.

        publish, again: offer the version to a number of engines, at first and whenever that number changes.
        An engine that dies of it is lost, and the others are brought there all the same; the report is None when none
        was left to measure. Raises SyncError when an update fails and no engine is to blame.
        """
        async with self.fleet.weights():
            published = await publish(len(self.fleet.engines))
            self._offer = again
            with ExitStack() as stack:
                for engine in self.fleet.engines:
                    stack.enter_context(self._updating(engine))
                told = await self._bring(published, len(self.fleet.engines))
            self._asleep = False
            return published, told

    async def _bring(self, published: Published, count: int) -> SyncReport | None:
        """count: of engines that `published` was offered to."""
        told, offered = None, published
        while engines := list(self.fleet.engines):
            try:
                has = await asyncio.gather(*(engine.client.weight_version() for engine in engines))
                behind = [e.client for e, v in zip(engines, has, strict=True) if v != str(published.version)]
                if not behind:
                    break
                if offered is None or len(behind) != count:
                    offered = await self._offer(len(behind))
                taken, offered = offered, None  # tried again, it is offered again
                await self._wake(behind, "weights")  # not yet the cache: both versions of the weights need room
                told = await sync(behind, taken, in_flight="keep")
                await self._wake(behind, "kv_cache")
            except (SyncError, EngineError):
                if not await self.fleet.bury(engines):
                    raise
        return told

    async def _wake(self, clients: Sequence[EngineClient], what: str) -> None:
        if self._asleep:
            await asyncio.gather(*(client.wake_up([what]) for client in clients))

    async def _welcome(self, client: EngineClient) -> None:
        if self._offer is not None:
            await sync([client], await self._offer(1), in_flight="keep")

    def _tell(self, line: str) -> None:
        report(line)
        self._lines.append(line)
        draining = sum(engine.draining for engine in self.fleet.engines)
        self._control.tell(
            {
                "wanted": self.fleet.wanted,
                "serving": len(self.fleet.engines) - draining,
                "draining": draining,
                "refused": str(self.fleet.refused) if self.fleet.refused else None,
                "lines": self._lines,
            }
        )

    async def _obey(self) -> None:
        while True:
            await asyncio.sleep(OBEY_S)
            wanted = self._control.wanted()
            if wanted is not None and wanted != self.fleet.wanted:
                await self.fleet.resize(wanted)
                self._tell(f"{wanted} engines are wanted")
