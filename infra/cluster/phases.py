"""How long the two sides of RL worked in an earlier run of the same target: what `auto` places by."""

from pydantic import BaseModel, ConfigDict

from infra.services import runs


class Phases(BaseModel):
    """Seconds of one finished run. run: its key; rollout_s: engines worked; trainer_s: the trainer worked."""

    model_config = ConfigDict(frozen=True)

    run: str
    rollout_s: float
    trainer_s: float


def measured_phases(target: str, engines: int, ranks: int) -> Phases | None:
    """Those of the newest finished run that trained `target` with so many engines and trainer ranks, if any."""
    for run in reversed(runs.every()):
        cluster = run.config.get("cluster", {})
        if run.target != target or (cluster.get("engines"), cluster.get("trainer_ranks")) != (engines, ranks):
            continue
        outcome = run.outcome or {}
        spans = outcome.get("spans") if run.flow == "rl" else outcome.get("phases", {}).get("rl", {}).get("spans")
        if spans and spans.get("engine") and spans.get("trainer"):
            return Phases(run=run.key, rollout_s=spans["engine"], trainer_s=spans["trainer"])
    return None
