"""The fleet of one machine: makes what is served follow the wish, and says what is served.

A wish that names another triple is followed once every replica of it is ready; until then the old one serves. A triple
that no route names any more is stopped when its last answer has left.
"""

import asyncio
import logging
import os
import secrets
import signal
import tempfile
import time
from pathlib import Path

from infra.cluster.session import session
from infra.services.home import home
from infra.serving.envoy import CUT, Envoy
from infra.serving.pool import Pool
from infra.serving.state import KEY_VARIABLE, State, Triple, Wish

POLL_S = 0.25
STATE_EVERY_S = 1.0
QUIET_LOOKS = 4
"""Looks in a row at which a release must have no request in flight before it is stopped."""

_logger = logging.getLogger(__name__)


class Fleet:
    """Use `run`."""

    def __init__(self, envoy: Envoy, key: str) -> None:
        self._envoy, self._key = envoy, key
        self._pools: dict[str, Pool] = {}
        self._known: set[str] = set()
        self._leaving: dict[str, tuple[float, int]] = {}  # key -> since when, quiet looks so far
        self._routed = ("", "", 0)
        self._version = ""
        self._generation = -1
        self._endpoints: dict[str, list] = {}
        self._written = (0.0, None)
        self._cut = self._failed = 0
        self._wake = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the wish until `stop`."""
        try:
            while not stop.is_set():
                wish = Wish.read()
                if wish:
                    await self._follow(wish)
                if not self._envoy.alive():
                    _logger.error("Envoy has ended: starting it again")
                    self._envoy.launch()
                self._tell()
                self._wake.clear()
                waits = [asyncio.create_task(stop.wait()), asyncio.create_task(self._wake.wait())]
                await asyncio.wait(waits, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in waits:
                    task.cancel()
        finally:
            await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _follow(self, wish: Wish) -> None:
        wanted = {t.key: t for t in (wish.stable, wish.canary) if t}
        for key, triple in wanted.items():
            if key not in self._pools:
                self._pools[key] = self._pool(triple, wish)
            self._pools[key].check()
            self._leaving.pop(key, None)
        self._point()
        if all(self._pools[key].ever_ready for key in wanted):
            await self._route(wish)
        await self._count()
        await self._retire(wanted, wish.config.drain_s)

    def _pool(self, triple: Triple, wish: Wish) -> Pool:
        _logger.info("starting %d replicas of %s", wish.config.replicas, triple.label)
        return Pool(triple, wish.config.replicas, self._key, wish.config.silent_s, self._wake.set)

    def _point(self) -> None:
        """Tell Envoy where replicas are. A canary without a live one is answered for by the champion's."""
        stable, canary, _ = self._routed
        for key, pool in self._pools.items():
            fallback = pool.ready == 0 and key == canary and stable in self._pools and self._pools[stable].ready
            addresses = self._pools[stable].addresses if fallback else pool.addresses
            if addresses and addresses != self._endpoints.get(key):
                self._endpoints[key] = addresses
                self._envoy.endpoints(key, addresses)
                if key not in self._known:
                    self._known.add(key)
                    self._envoy.clusters({k: self._pools[k].triple.label for k in self._known})

    async def _route(self, wish: Wish) -> None:
        routes = (wish.stable.key if wish.stable else "", wish.canary.key if wish.canary else "", wish.share)
        if routes != self._routed:
            for key in filter(None, routes[:2]):
                if not await self._envoy.knows(key):
                    return  # looked at again in a moment
            self._version = self._envoy.routes(*routes)
            self._routed = routes
        if self._generation != wish.generation and await self._followed():
            _logger.info("generation %d is served: %s", wish.generation, self._routed)
            self._generation = wish.generation

    async def _followed(self) -> bool:
        """Whether Envoy routes as it was told last."""
        stats = await self._envoy.stats()
        return not self._version or stats.get("http.front.rds.front.version_text") == self._version

    async def _count(self) -> None:
        for failure in self._envoy.new_failures():
            cut = CUT in (failure["details"] or "")
            self._cut, self._failed = self._cut + cut, self._failed + (not cut and failure["code"] >= 500)
            pool = self._pools.get(failure["cluster"] or "")
            if pool and cut:
                pool.envoy = pool.envoy.model_copy(update={"cut": pool.envoy.cut + 1})
        stats = await self._envoy.stats()
        for key, pool in self._pools.items():
            errors = int(stats.get(f"cluster.{key}.upstream_rq_5xx", pool.envoy.errors))
            pool.envoy = pool.envoy.model_copy(update={"errors": errors})

    async def _retire(self, wanted: dict[str, Triple], drain_s: float) -> None:
        gone = [key for key in self._pools if key not in wanted and key not in self._routed[:2]]
        stats = await self._envoy.stats() if gone else {}
        for key in gone:
            since, quiet = self._leaving.setdefault(key, (time.monotonic(), 0))
            active = int(stats.get(f"cluster.{key}.upstream_rq_active", 0))
            quiet = quiet + 1 if stats and not active and await self._followed() else 0
            self._leaving[key] = (since, quiet)
            if quiet >= QUIET_LOOKS or time.monotonic() - since > drain_s:
                await self._stop(key, active)

    async def _stop(self, key: str, active: int) -> None:
        pool = self._pools.pop(key)
        _logger.info("stopping %s%s", pool.triple.label, f", {active} answers unfinished" if active else "")
        self._known.discard(key)
        self._endpoints.pop(key, None)
        del self._leaving[key]
        self._envoy.clusters({k: self._pools[k].triple.label for k in self._known})
        await pool.close()

    def _tell(self) -> None:
        stable, canary, share = self._routed
        state = State(
            pid=os.getpid(),
            generation=self._generation,
            stable=stable,
            canary=canary,
            share=share,
            pools={key: pool.state() for key, pool in self._pools.items()},
            cut=self._cut,
            failed=self._failed,
        )
        when, last = self._written
        if state != last and (time.monotonic() - when > STATE_EVERY_S or _news(state, last)):
            state.write()
            self._written = (time.monotonic(), state)


def _news(state: State, last: State | None) -> bool:
    """Whether more than counters has changed."""

    def bare(some: State) -> State:
        return some.model_copy(
            update={"pools": {k: p.model_copy(update={"counters": None}) for k, p in some.pools.items()}}
        )

    return last is None or bare(state) != bare(last)


async def main(port: int) -> None:
    """Serve on `port` until SIGTERM or SIGINT."""
    wish = Wish.read()
    given = os.environ.get(KEY_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="lockstep-fleet-") as folder:
        log = home() / "logs" / "envoy.log"
        key = given or secrets.token_urlsafe(32)
        envoy = Envoy(Path(folder), wish.config, port, key, open_to_all=given is None, log=log)
        State(pid=os.getpid()).write()
        envoy.start()
        await asyncio.to_thread(session().resources)  # starts Ray, which takes the signals for itself
        session().warm_up()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            await Fleet(envoy, key).run(stop)
        finally:
            envoy.stop()
            session().close()
