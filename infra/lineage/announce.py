"""What happens to versions is told to Prefect, once each, so that it can start what has to follow.

Every event names its target (`lockstep.name`, `lockstep.target`) and who made it (`lockstep.by`: the flow, `register`,
or `loop` for the phases of a loop, which runs what follows itself).
"""

import os

from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.services import environment

REGISTERED = "lockstep.target.registered"
DRIFTED = "lockstep.drafter.drifted"
MEASURED = {"drafter": "lockstep.drafter.measured", "quant": "lockstep.quant.measured"}
PROMOTED = "lockstep.release.promoted"
REFUSED = "lockstep.release.refused"

ANNOUNCED = "lockstep.announced"  # tag of a version that was told; value: the event's id


def announce(lineage: Lineage, event: str, version: Version, *, by: str) -> None:
    """Tell that `event` happened to `version`, unless that was told before. Where no Prefect server is known there is
    nobody to tell: the next `lockstep watch` finds what is new."""
    environment.apply()
    if ANNOUNCED in version.tags or "PREFECT_API_URL" not in os.environ:
        return
    target = version.parts.get("target", version.label)
    told = tell(event, version.label, version, target, by, {version.kind: version.label, "parent": version.parent})
    lineage.tag(version, {ANNOUNCED: told})


def tell(
    event: str, key: str, version: Version, target: str, by: str, about: dict[str, str | float | bool | None]
) -> str:
    """Emit `event` about `version`, whose target is labelled `target`; `key` and `about` as `emit` takes them."""
    from infra.services.events import emit

    resource = {
        "prefect.resource.id": f"lockstep.{version.kind}.{version.label}",
        "prefect.resource.name": version.label,
        "lockstep.name": version.name,
        "lockstep.target": target,
        "lockstep.by": by,
    }
    return str(emit(event, key, resource, {"target": target, **about}))
