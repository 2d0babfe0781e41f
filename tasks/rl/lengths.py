"""Answers as long as a measurement wants them: most are short, a few are very long."""

import math
import random

MEDIANS, P99_MEDIANS = 12, 10
"""The longest answer, and the 99th percentile, in medians."""
_P99 = 2.326  # standard deviations to the 99th percentile


class Lengths:
    """Lognormal lengths: the median a twelfth of `longest`, the 99th percentile ten medians, none above `longest`.

    drawn: those that were asked for so far, tokens.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.drawn: list[int] = []

    def __call__(self, seed: int) -> int:
        """Tokens of the answer with this seed: the same every time."""
        spread = math.log(P99_MEDIANS) / _P99
        length = self.longest / MEDIANS * math.exp(random.Random(seed).gauss(0, spread))
        self.drawn.append(min(self.longest, max(1, round(length))))
        return self.drawn[-1]
