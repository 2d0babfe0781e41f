"""The rollout engines of one run: as many as were asked for last, all with the weights that were sent last."""

import asyncio
from collections.abc import Awaitable, Callable
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

OBEY_S = 1.0
"""How often a run looks whether it was asked for more or fewer engines, seconds."""


class RolloutEngines:
    """Async context manager. base: the model they start with. folder: of the run. reserve: devices of each engine.

    fleet: where work is done. Entering starts them and returns at once. updating(engine): a context in which an engine
    takes new weights.
    """

    def __init__(
        self,
        base: Path,
        config: RLFlowConfig,
        folder: Path,
        reserve: Resources,
        updating: Callable[[Engine], AbstractContextManager],
        speculation: Speculation | None = None,
    ):
        self._config, self._control, self._updating = config, Control(folder), updating
        self._lines: list[str] = []
        self._published: Published | None = None
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

    async def send(self, publish: Callable[[], Awaitable[Published]]) -> tuple[Published, SyncReport | None]:
        """Publish a version and bring all engines to it; those that join later start from it.

        An engine that dies of it is lost, and the others are brought there all the same; the report is None when none
        was left to measure. Raises SyncError when an update fails and no engine is to blame.
        """
        async with self.fleet.weights():
            published = await publish()
            self._published = published
            with ExitStack() as stack:
                for engine in self.fleet.engines:
                    stack.enter_context(self._updating(engine))
                return published, await self._bring(published)

    async def _bring(self, published: Published) -> SyncReport | None:
        told = None
        while engines := list(self.fleet.engines):
            try:
                has = await asyncio.gather(*(engine.client.weight_version() for engine in engines))
                behind = [e for e, version in zip(engines, has, strict=True) if version != str(published.version)]
                if not behind:
                    break
                told = await sync([engine.client for engine in behind], published, in_flight="keep")
            except (SyncError, EngineError):
                if not await self.fleet.bury(engines):
                    raise
        return told

    async def _welcome(self, client: EngineClient) -> None:
        if self._published is not None:
            await sync([client], self._published, in_flight="keep")

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
