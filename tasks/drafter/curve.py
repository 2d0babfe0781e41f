"""What a drafter's training looked like, step by step."""

from pydantic import BaseModel


class Curve(BaseModel):
    """One entry per optimizer step; step 0 is the drafter before training. None where nothing was measured.

    loss: nats per trained row, for a head summed over training-time-test steps. grad_norm: before clipping.
    held_out_acceptance: acceptance length on the held-out sequences.
    """

    step: list[int] = []
    loss: list[float | None] = []
    lr: list[float | None] = []
    grad_norm: list[float | None] = []
    held_out_acceptance: list[float | None] = []

    def add(self, step: int, **entry: float | None) -> None:
        self.step.append(step)
        for name in ("loss", "lr", "grad_norm", "held_out_acceptance"):
            getattr(self, name).append(entry.get(name))

    def looks(self) -> list[float]:
        """The held-out acceptances, oldest first."""
        return [a for a in self.held_out_acceptance if a is not None]
