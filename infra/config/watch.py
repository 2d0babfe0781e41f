"""The `watch` section: when a drafter has drifted from its target, and what then has to be done."""

from pydantic import Field, model_validator

from infra.config.base import Section


class WatchConfig(Section):
    target: str = "latest"
    """Target version on which the drafter is measured: a number, an alias or `latest`. Where that version has a
    measured drafter already, the champion's drafter is measured on fresh traffic instead."""
    refresh_above: float = Field(0.03, ge=0, lt=1)
    """Share of its acceptance length that a drafter may lose; one that lost more is trained on, from what it is."""
    retrain_above: float = Field(0.3, ge=0, lt=1)
    """One that lost more than this share is trained from nothing."""
    retrain_below: float = Field(1.05, ge=1)
    """One whose acceptance length is below this is trained from nothing, whatever it lost, tokens per target pass."""
    min_drafts: int = Field(32, ge=1)
    """Smallest sample on which a drafter is kept, drafts; on a smaller one it is trained on to be safe."""

    @model_validator(mode="after")
    def _check(self):
        if self.retrain_above < self.refresh_above:
            raise ValueError(
                f"watch.retrain_above={self.retrain_above:g} is below watch.refresh_above={self.refresh_above:g}: a "
                f"drafter worth training from nothing has lost more than one worth training on"
            )
        return self
