"""What is killed when, and what came of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

SERVICES = ("prefect", "worker", "mlflow", "postgres", "seaweedfs")
TARGETS = (*SERVICES, "flow", "engine", "trainer")
LONGEST_S = 25.0  # from the last kill, or the start of the loop or of its continuation, to the kill
GOES_ON, CONTINUED = "goes on", "continued"


@dataclass(frozen=True)
class Kill:
    """target: one of TARGETS. after_s: seconds of the loop's work before the kill, or until there is such a process."""

    target: str
    after_s: float


@dataclass
class Outcome:
    """What came of a kill.

    point: what the loop said last. back_s: seconds until every service answered. lost: what was there before and is not
    any more, and broken links. ended: how the loop ended before the next kill, to be continued by the same command; ""
    when it went on.
    """

    kill: Kill
    point: str
    back_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    ended: str = ""

    @property
    def then(self) -> str:
        """What the loop did, in a word."""
        return CONTINUED if self.ended else GOES_ON


def plan(seed: int, count: int, targets: Sequence[str] = TARGETS) -> list[Kill]:
    """`count` kills, each target as often as any other, in random order at random times."""
    dice = random.Random(seed)
    order = [target for _ in range(-(-count // len(targets))) for target in dice.sample(targets, len(targets))]
    return [Kill(target, dice.uniform(1.0, LONGEST_S)) for target in order[:count]]


def table(outcomes: Sequence[Outcome]) -> str:
    """What came of the kills, a line for each target."""
    lines = [f"{'killed':<10}{'times':>6}{'goes on':>9}{'continued':>11}{'back, s: median':>17}{'max':>7}{'lost':>6}"]
    for target in (*TARGETS, "all"):
        of = [outcome for outcome in outcomes if target in ("all", outcome.kill.target)]
        if of:
            back = [outcome.back_s for outcome in of]
            goes_on = sum(outcome.then == GOES_ON for outcome in of)
            lost = sum(len(outcome.lost) for outcome in of)
            lines.append(
                f"{target:<10}{len(of):>6}{goes_on:>9}{len(of) - goes_on:>11}"
                f"{median(back):>17.1f}{max(back):>7.1f}{lost:>6}"
            )
    return "\n".join(lines)
