"""Ask a running fleet to serve something, and wait until it does."""

import os
import time
from collections.abc import Callable, Iterator

from infra.config.fleet import FleetConfig
from infra.engine.pin import accelerated
from infra.engine.spec import EngineHandle, Role
from infra.services import supervise
from infra.services.local import FLEET
from infra.services.record import Record
from infra.serving.state import KEY_VARIABLE, PoolState, State, Triple, Wish

POLL_S = 0.2
ROUTED_S = 60.0
"""Longest time from the last replica's readiness to Envoy's routing to it."""

Say = Callable[[str], None]


class FleetError(RuntimeError):
    """The fleet cannot serve what it was asked to. The message names the cause and what to do."""


def running(name: str) -> "Fleet | None":
    """The fleet of this machine, if it runs and serves the target `name`."""
    record, wish = Record.read(FLEET), Wish.read()
    if record is None or wish is None or wish.name != name or not supervise.alive(record):
        return None
    return Fleet(record)


class Fleet:
    """A running fleet. Use `running`."""

    def __init__(self, record: Record) -> None:
        self._record = record

    @property
    def address(self) -> str:
        """Where clients reach it, always."""
        return self._record.address

    @property
    def config(self) -> FleetConfig:
        return self.wish.config

    @property
    def wish(self) -> Wish:
        wish = Wish.read()
        assert wish is not None
        return wish

    @property
    def handle(self) -> EngineHandle:
        """The stable address as an engine."""
        key = os.environ.get(KEY_VARIABLE, "")
        return EngineHandle(url=self.address, key=key, model=self.wish.name, role=Role.serve, accelerated=accelerated())

    def pool(self, triple: Triple) -> PoolState:
        """The replicas of `triple`. Raises FleetError when the fleet has none."""
        state = State.read()
        if state is None or triple.key not in state.pools:
            raise FleetError(f"the fleet does not serve {triple.label}: see {self._record.log}")
        return state.pools[triple.key]

    def ask(self, *, stable: Triple | None, canary: Triple | None = None, share: int = 0, say: Say) -> None:
        """Serve `stable`, and `canary` for `share` percent of the requests, and wait until that is so.

        say: told what is waited for. Raises FleetError when a replica does not start, with its engine's own cause, or
        when the fleet ends; the wish stays as it was asked.
        """
        wish = self.wish_for(stable, canary, share)
        told, ready_since = "", None
        for state in self.states():
            if state.generation == wish.generation:
                return
            wanted = [state.pools.get(triple.key) for triple in (stable, canary) if triple]
            if not all(pool and pool.ever_ready for pool in wanted):
                ready_since = None
            elif time.monotonic() - (ready_since := ready_since or time.monotonic()) > ROUTED_S:
                raise FleetError(f"Envoy does not follow its routes: see {self._record.log} and envoy.log beside it")
            for triple in filter(None, (stable, canary)):
                pool = state.pools.get(triple.key)
                if pool and pool.problem and not pool.ever_ready:
                    raise FleetError(f"{triple.label} does not start in the fleet: {pool.problem}")
                line = f"{triple.label}: {pool.ready if pool else 0} of {wish.config.replicas} replicas ready"
                if not (pool and pool.ever_ready) and line != told:
                    say(line)
                    told = line

    def wish_for(self, stable: Triple | None, canary: Triple | None = None, share: int = 0) -> Wish:
        """What `ask` does, without waiting."""
        now = self.wish
        update = {"generation": now.generation + 1, "stable": stable, "canary": canary, "share": share}
        wish = now.model_copy(update=update)
        wish.write()
        return wish

    def states(self) -> Iterator[State]:
        """What it serves, again and again, as long as it runs. Raises FleetError when it ends."""
        while True:
            if not supervise.alive(self._record):
                raise FleetError(f"the fleet has ended: see {self._record.log}, then `lockstep serve`")
            state = State.read()
            if state and state.pid == self._record.pid:
                yield state
            time.sleep(POLL_S)
