"""Rollouts with a drafter: the same distribution in fewer passes, where that was measured to be faster."""

import math

from pydantic import BaseModel, ConfigDict

from infra.config.flows import RLFlowConfig
from infra.engine.drafters import speculation
from infra.engine.spec import Speculation
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.services.prefect import durable
from infra.services.progress import report
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.evaluate.best_k import Proposal, proposals, schedule

TABLE = "evidence.parquet"


class Proposing(BaseModel):
    """A drafter, and how many tokens it proposes at each number of requests in flight."""

    model_config = ConfigDict(frozen=True)

    drafter: ArtifactRef
    label: str
    proposals: list[Proposal]

    def speculation(self) -> Speculation:
        """As an engine takes it."""
        most = max(p.num_tokens for p in self.proposals)
        return speculation(open_store().open(self.drafter), most).model_copy(
            update={"schedule": schedule(self.proposals)}
        )


@durable(name="choose a drafter for rollouts", outlives_edits=True)
def choose_drafter(base: Version, config: RLFlowConfig, run: str) -> Proposing | None:
    """The drafter of `base` that was measured to be fastest near the rollouts' number of requests in flight; None, with
    the reason told, where none is faster than plain decoding there or none was asked for. Kept with the run."""
    if not config.rl.speculate:
        return None
    asked = config.rl.prompts_per_step * config.rl.group_size // config.cluster.engines
    in_flight = max(1, min(asked, config.engine.max_concurrent_sequences))
    store, best, speed = open_store(), None, 1.0
    drafters = Lineage().drafters(base)
    for drafter in drafters:
        tables = [evidence.read(store.open(ref) / TABLE) for ref in drafter.evidence]
        found = proposals(evidence.concat(tables), drafter.subject) if tables else []
        near = min(found, key=lambda p: abs(math.log(p.concurrency / in_flight)), default=None)
        if near and near.num_tokens and near.speedup > speed:
            best, speed = Proposing(drafter=drafter.artifact, label=drafter.label, proposals=found), near.speedup
    if best:
        report(f"rollouts with {best.label}: measured {speed:.2f}x at about {in_flight} requests in flight")
    else:
        what = (
            f"none of its {len(drafters)} drafters is faster than plain decoding" if drafters else "it has no drafter"
        )
        report(f"rollouts of {base.label} without speculation: {what} at about {in_flight} requests in flight")
    return best
