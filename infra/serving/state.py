"""What a fleet shall serve and what it serves: two files below the home, each written by one side, read by the other.

The wish outlives both sides: a fleet that starts again serves what was last wished for.
"""

import hashlib
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from infra.config.fleet import FleetConfig
from infra.engine.spec import EngineSpec
from infra.services.home import home
from infra.services.record import write_json
from infra.serving.counters import Counters
from infra.store.refs import ArtifactRef

SIDE_HEADER = "x-lockstep-side"
"""A request that says `canary` or `stable` here is answered by that side, whatever the shares."""
KEY_VARIABLE = "LOCKSTEP_SERVE_KEY"
"""Environment variable with the key that clients send; without it the fleet is open, to this machine alone."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Triple(_Frozen):
    """What the replicas of one release serve.

    parts: labels of target, drafter and quant, as far as it has them. artifacts: what of it engines load. spec: the
    engine that serves them.
    """

    parts: dict[str, str]
    artifacts: list[ArtifactRef]
    spec: EngineSpec

    @property
    def key(self) -> str:
        """12 hex digits that tell it from every other combination of parts and settings."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """Such as `smol/3 smol-quant/2`."""
        return " ".join(self.parts.values())


class _Kept(_Frozen):
    """What one file in the fleet's folder holds."""

    FILE: ClassVar[str]

    @classmethod
    def path(cls) -> Path:
        return home() / "fleet" / cls.FILE

    @classmethod
    def read(cls) -> Self | None:
        """What was written last, None before the first time."""
        try:
            return cls.model_validate_json(cls.path().read_text())
        except FileNotFoundError:
            return None

    def write(self) -> None:
        """Replace the file in one step."""
        write_json(self.path(), self.model_dump(mode="json"))


class Wish(_Kept):
    """What the fleet shall serve.

    name: of the target. stable: serves `100 - share` percent of the requests; None serves nothing yet. canary: is
    started beside it and gets `share` percent. generation: counts the wishes.
    """

    FILE = "wish.json"

    name: str
    config: FleetConfig
    generation: int = 0
    stable: Triple | None = None
    canary: Triple | None = None
    share: int = 0


class PoolState(_Frozen):
    """Replicas of one triple. ready: how many answer. ever_ready: all of them have answered once. restarts: replicas
    replaced since. problem: why the last start failed, "" when it did not. counters: of all its replicas so far."""

    label: str
    ready: int = 0
    ever_ready: bool = False
    restarts: int = 0
    problem: str = ""
    counters: Counters = Counters()


class State(_Kept):
    """What the fleet serves.

    pid: the fleet's process. generation: of the wish that the routes follow. pools: by key of their triple.
    cut: streams that ended with an error because their replica died. failed: requests that got no answer.
    """

    FILE = "state.json"

    pid: int
    generation: int = -1
    stable: str = ""
    canary: str = ""
    share: int = 0
    pools: dict[str, PoolState] = {}
    cut: int = 0
    failed: int = 0
