"""The loop: train the target, refresh its drafter, quantize it, prove all three, release what passes, report."""

import time
from datetime import UTC, datetime
from functools import partial

from prefect import flow

from flows.drafter import drafter
from flows.outcome import run_name
from flows.quantize import quantize
from flows.release import release
from flows.reporting import publish
from flows.rl import rl
from infra.cluster.session import session
from infra.config.flows import (
    DrafterFlowConfig,
    LoopConfig,
    QuantizeFlowConfig,
    ReleaseFlowConfig,
    RLFlowConfig,
)
from infra.lineage.lineage import Lineage
from infra.services.patience import patiently
from infra.services.progress import report
from infra.services.runs import Refused, RunKey, claim, keep_outcome
from tasks.quant.steps import check_scheme
from tasks.report.summary import LoopSummary, Phase


@flow(name="loop", flow_run_name=run_name)
def loop(config: LoopConfig, run: RunKey | None = None) -> LoopSummary:
    """One trip: rl -> drafter -> quantize -> release, then the report. Interrupted, it goes on where it was.

    Raises Refused, after the report is written, when a target or safety gate failed.
    """
    with claim("loop", config, run) as key, Lineage().run(key, "loop", model=config.target.name) as mlflow_run:
        trip = Trip(key, mlflow_run.id)
        session().warm_up()  # meanwhile the base is prepared and the scheme checked
        check_scheme(config.target, config.quantize, config.engine.dtype, key)
        policy = trip.phase(rl, config.narrow(RLFlowConfig))
        head = trip.phase(drafter, config.narrow(DrafterFlowConfig), target=policy.target)
        copy = trip.phase(quantize, config.narrow(QuantizeFlowConfig), target=policy.target, drafter=head.drafter)
        shipped = trip.phase(
            release, config.narrow(ReleaseFlowConfig), target=policy.target, drafter=head.drafter, quant=copy.quant
        )

        report("drawing the report")
        summary = publish(config, trip.started, trip.phases, policy, head, copy, shipped, mlflow_run)
        keep_outcome(key, summary)
        if shipped.refused:
            raise Refused(shipped.decision.refusal)
        return summary


class Trip:
    """The phases of one run, in order, with what they took."""

    def __init__(self, key: RunKey, mlflow_run_id: str):
        self.key = key
        self.mlflow_run_id = mlflow_run_id
        self.started = datetime.now(UTC)
        self.phases: dict[str, Phase] = {}

    def phase(self, subflow, config, **versions: str | None):
        """Run one phase. One that took less than its own recorded work was taken over from an interrupted run."""
        start = time.monotonic()
        # called again where Prefect was away when it began: it finds what it has done
        outcome = patiently(partial(subflow, config, run=self.key, parent_run=self.mlflow_run_id, **versions))
        seconds, work = time.monotonic() - start, sum(outcome.spans.values())
        self.phases[subflow.name] = Phase(seconds=seconds, cached=seconds < work, spans=outcome.spans)
        return outcome
