"""Paired statistics: the same questions or texts measured before and after a change."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tasks.evaluate.evidence import row

RESAMPLES = 10_000
LEVEL = 0.95
Z = 1.959964  # 95% of a normal distribution lies within this many standard deviations


class McNemar(NamedTuple):
    """Exact McNemar test of two paired yes/no outcomes.

    gained: pairs that went from no to yes; lost: from yes to no; p_value: two-sided, of `gained` and `lost` being
    draws of a fair coin.
    """

    gained: int
    lost: int
    p_value: float


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> McNemar:
    """Test whether `after` is right more or less often than `before` on the same questions.

    p = min(1, 2 P(X <= min(gained, lost))), X ~ Binomial(gained + lost, 1/2) (McNemar 1947, exact form).
    Raises ValueError when the lengths differ.
    """
    _check_pairs(before, after)
    gained = sum(bool(a) and not b for b, a in zip(before, after, strict=True))
    lost = sum(bool(b) and not a for b, a in zip(before, after, strict=True))
    changed = gained + lost
    tail = sum(math.comb(changed, i) for i in range(min(gained, lost) + 1))
    return McNemar(gained, lost, min(1.0, 2 * tail / 2**changed))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], *, seed: int) -> tuple[float, float]:
    """95% percentile bootstrap interval of sum(numerators) / sum(denominators), resampling whole items.

    An item is a question (denominator 1) or a text (numerator: the sum of a figure over its tokens, denominator: its
    tokens), so that tokens of one text, which are not independent, stay together. (nan, nan) for fewer than two
    items. The percentile interval is somewhat narrow on small samples (Efron and Tibshirani 1993, chapter 13).
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if top.shape != bottom.shape:
        raise ValueError(f"{len(top)} numerators for {len(bottom)} denominators: give one of each per item")
    if len(top) < 2:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    ratios = np.empty(RESAMPLES)
    block = max(1, 2_000_000 // len(top))  # bounds the memory of one block of resamples
    for start in range(0, RESAMPLES, block):
        picks = generator.integers(len(top), size=(min(block, RESAMPLES - start), len(top)))
        ratios[start : start + len(picks)] = top[picks].sum(1) / bottom[picks].sum(1)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def difference_row(
    figure: str,
    before: Sequence[float],
    after: Sequence[float],
    *,
    unit: str,
    subject: str,
    domain: str = "",
    seed: int = 0,
    dataset_digest: str = "",
) -> dict:
    """Evidence row of mean(after - before) over pairs, with its 95% paired bootstrap interval; n counts pairs.

    Raises ValueError when the lengths differ or there are no pairs.
    """
    _check_pairs(before, after)
    differences = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    labels = dict(unit=unit, subject=subject, domain=domain, dataset_digest=dataset_digest)
    return mean_row(figure, differences, seed=seed, **labels)


def mean_row(figure: str, values: Sequence[float], *, seed: int = 0, **labels) -> dict:
    """Evidence row of the mean of `values`, one per item, with its 95% bootstrap interval; `labels` are `row`'s."""
    low, high = ratio_interval(values, np.ones(len(values)), seed=seed)
    return row(figure, float(np.mean(values)), low=low, high=high, n=len(values), **labels)


def paired_rows(
    figures: tuple[str, str, str], before: Sequence[float], after: Sequence[float], *, seed: int = 0, **labels
) -> list[dict]:
    """Evidence rows of the mean before, the mean after and the paired difference, named by `figures` in that order;
    `labels` are `row`'s.

    Raises ValueError as `difference_row` does.
    """
    difference = difference_row(figures[2], before, after, seed=seed, **labels)
    return [
        mean_row(figures[0], before, seed=seed, **labels),
        mean_row(figures[1], after, seed=seed, **labels),
        difference,
    ]


def share_difference_row(
    figure: str, before: Sequence[bool], after: Sequence[bool], *, unit: str, subject: str, **labels
) -> dict:
    """Evidence row of share(after) - share(before) over paired yes/no outcomes, n = pairs; `labels` are `row`'s.

    95% interval of Agresti and Min (2005): half a pair is added to each of the four outcomes of a pair, then Wald's.
    So pairs that all agree leave doubt, as a bootstrap of them does not: 16 of them 0.11 to either side, 100 of them
    0.02.
    Raises ValueError when the lengths differ or there are no pairs.
    """
    test, n = mcnemar(before, after), len(before)
    gained, lost, total = test.gained + 0.5, test.lost + 0.5, n + 2
    middle = (gained - lost) / total
    half = Z * math.sqrt(gained + lost - (gained - lost) ** 2 / total) / total
    ends = dict(low=max(-1.0, middle - half), high=min(1.0, middle + half))
    return row(figure, (test.gained - test.lost) / n, n=n, unit=unit, subject=subject, **ends, **labels)


def _check_pairs(before: Sequence, after: Sequence) -> None:
    if len(before) != len(after):
        raise ValueError(f"{len(before)} results before and {len(after)} after: ask both the same questions")
    if not len(before):
        raise ValueError("no pairs to compare: ask at least one question")
