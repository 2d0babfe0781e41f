"""Weight updates sized like a fabric: what a fleet needs, what was measured, and what a step waits."""

from collections.abc import Sequence
from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Fleet:
    """Who is to be kept up to date.

    parameters: billions. dtype: engines' weight type. engines: of the fleet. steps_per_hour: updates each gets.
    wait_share: largest share of a step that may be spent on its update.
    """

    parameters: float
    dtype: str
    engines: int
    steps_per_hour: float
    wait_share: float

    @property
    def gb(self) -> float:
        """GB of one update of one engine."""
        return self.parameters * BYTES[self.dtype]

    @property
    def step_s(self) -> float:
        return 3600 / self.steps_per_hour

    @property
    def needed_gb_s(self) -> float:
        """GB/s into each engine, so that the update takes no more than its share of a step."""
        return self.gb / (self.wait_share * self.step_s)


@dataclass(frozen=True)
class Rate:
    """Seconds of one update as a straight line of its size: fixed_s + gb / gb_s."""

    fixed_s: float
    gb_s: float

    def seconds(self, gb: float) -> float:
        return self.fixed_s + gb / self.gb_s


def fit(points: Sequence[tuple[float, float]]) -> Rate:
    """The least-squares line through measured (GB, seconds). One size, or a line that falls, gives a rate without a
    fixed part."""
    n = len(points)
    mean_gb, mean_s = sum(gb for gb, _ in points) / n, sum(s for _, s in points) / n
    spread = sum((gb - mean_gb) ** 2 for gb, _ in points)
    slope = sum((gb - mean_gb) * (s - mean_s) for gb, s in points) / spread if spread else 0.0
    fixed = mean_s - slope * mean_gb
    if slope <= 0 or fixed < 0:
        return Rate(0.0, mean_gb / mean_s)
    return Rate(fixed, 1 / slope)


def plan(fleet: Fleet, transport: str, whole: Rate, pause: Rate) -> tuple[dict[str, float], str]:
    """Figures and a sentence for one transport. whole: publication to the end of the pause; pause: of the engine."""
    update_s, pause_s = whole.seconds(fleet.gb), pause.seconds(fleet.gb)
    figures = {
        "plan_gb": fleet.gb,
        "plan_needed_gb_per_s": fleet.needed_gb_s,
        "plan_update_s": update_s,
        "plan_gb_per_s": fleet.gb / update_s,
        "plan_share_of_step": update_s / fleet.step_s,
        "plan_pause_share_of_step": pause_s / fleet.step_s,
    }
    verdict = "enough" if figures["plan_gb_per_s"] >= fleet.needed_gb_s else "too slow"
    sentence = (
        f"Plan, {transport}: {fleet.parameters:g} B parameters in {fleet.dtype} are {fleet.gb:.3g} GB an engine, "
        f"{fleet.gb * fleet.engines:.3g} GB for {fleet.engines}; {fleet.steps_per_hour:g} steps an hour leave "
        f"{fleet.wait_share:.0%} of {fleet.step_s:.3g} s for it: {fleet.needed_gb_s:.3g} GB/s into each engine are "
        f"needed, {figures['plan_gb_per_s']:.3g} GB/s were measured all included: {verdict}. A synchronous step waits "
        f"{update_s:.3g} s, {figures['plan_share_of_step']:.1%} of it; engines that serve meanwhile pause for "
        f"{pause_s:.3g} s, {figures['plan_pause_share_of_step']:.2%}."
    )
    return figures, sentence
