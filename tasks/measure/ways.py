"""Ways for weights to travel, and updates that travel them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.transport.transports import TRANSPORTS
from tasks.evaluate.measurement import MeasureError
from tasks.measure.devices import gpus
from tasks.measure.weights import Weights

if TYPE_CHECKING:
    from infra.engine.spec import EngineHandle
    from infra.transport.base import Reach, Sender
    from infra.transport.sync import SyncReport


@dataclass(frozen=True)
class Way:
    """A transport as it is measured. changed: share of the values that an update changes."""

    name: str
    transport: str
    changed: float = 1.0

    @property
    def elsewhere(self) -> bool:
        """Whether it needs an engine on another GPU than the trainer's."""
        return self.transport == "nccl" and gpus() > 0

    def sender(self, dtype: str, reach: "Reach") -> "Sender":
        """A trainer's side that sends what this measures: of `store` whole versions or changes only."""
        from infra.transport.store import StoreSender
        from infra.transport.transports import make_sender

        if self.transport != "store":
            return make_sender(self.transport, dtype, reach)
        return StoreSender(dtype, reach, whole_every=1 if self.changed == 1 else 1_000_000)


@dataclass(frozen=True)
class Update:
    """One update. moved: bytes that were written and read for it. report: what the engine says."""

    publish_s: float
    moved: int
    report: "SyncReport"

    @property
    def whole_s(self) -> float:
        """Seconds from the trainer's weights to an engine that serves them."""
        return self.publish_s + self.report.prepare_s + self.report.pause_s

    def part(self, name: str) -> float:
        """Seconds of it."""
        return self.publish_s if name == "publish_s" else getattr(self.report, name)


def ways(transports: Sequence[str], changed: float, say: Callable[[str], None]) -> list[Way]:
    """How each transport is measured: `store` in two ways, the second with that share of values changed.

    Raises MeasureError when one is not known, or none can be measured here.
    """
    found = []
    for transport in transports:
        if transport not in TRANSPORTS:
            raise MeasureError(
                f"--transports {transport}: there is no such transport; there are {', '.join(TRANSPORTS)}"
            )
        if transport == "store":
            found += [Way("store whole", transport), Way("store change", transport, changed)]
        else:
            found.append(Way(transport, transport))
    if gpus() == 1 and any(way.elsewhere for way in found):
        say("nccl is left out: it needs a second GPU for the engine")
        found = [way for way in found if not way.elsewhere]
    if not found:
        raise MeasureError("no transport is left to measure: name others in --transports")
    return found


async def updates(handle: "EngineHandle", way: Way, weights: Weights, repeats: int, reach: "Reach") -> list[Update]:
    """Updates of an idle engine: all but the first, which warms up and, where changes are moved, is whole."""
    from infra.engine.client import EngineClient
    from infra.transport.store import StoreSender
    from infra.transport.sync import sync

    found = []
    async with EngineClient(handle) as client:
        with way.sender(weights.dtype, reach) as sender:
            for version in range(1, repeats + 2):
                weights.change(way.changed)
                published = sender.publish(version, weights.tensors.items())
                moved = sender.manifest.bytes if isinstance(sender, StoreSender) else published.bytes
                found.append(Update(published.publish_s, moved, await sync([client], published)))
    return found[1:]
