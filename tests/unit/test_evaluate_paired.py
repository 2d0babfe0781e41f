from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from tasks.evaluate.paired import difference_row, mcnemar, paired_rows, ratio_interval, share_difference_row

outcomes = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(outcomes)
def test_mcnemar_is_the_exact_binomial_test(pairs):
    before, after = zip(*pairs, strict=True)
    result = mcnemar(before, after)
    assert result.gained == sum(a > b for b, a in pairs) and result.lost == sum(a < b for b, a in pairs)
    changed = result.gained + result.lost
    expected = binomtest(result.gained, changed, 0.5).pvalue if changed else 1.0
    assert result.p_value == pytest.approx(expected, rel=1e-12)


def test_the_interval_matches_the_exact_bootstrap_distribution():
    top, bottom = np.array([3.0, 0.5, 4.0, 1.0, 2.5, 7.0]), np.array([4.0, 1.0, 6.0, 1.0, 2.0, 5.0])
    picks = np.array(list(product(range(6), repeat=6)))  # all 46,656 resamples, equally likely
    exact = np.sort(top[picks].sum(1) / bottom[picks].sum(1))
    low, high = ratio_interval(top, bottom, seed=3)
    ranks = np.searchsorted(exact, [low, high]) / len(exact)
    assert ranks == pytest.approx([0.025, 0.975], abs=0.006)  # three standard errors of 10,000 draws


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    trials = 300
    covered = 0
    for seed in range(trials):
        differences = generator.choice([-1.0, 0.0, 1.0], p=[0.15, 0.6, 0.25], size=200)
        low, high = ratio_interval(differences, np.ones(200), seed=seed)
        covered += low <= 0.1 <= high
    assert binomtest(covered, trials, 0.95).pvalue > 0.001


@pytest.mark.parametrize("lost, gained", [(0.0, 0.0), (0.02, 0.0), (0.15, 0.25), (0.5, 0.5)])
@pytest.mark.parametrize("n", [8, 60])
def test_the_interval_of_two_shares_covers_the_truth_at_least_as_often_as_it_says(lost, gained, n):
    generator, trials, covered = np.random.default_rng(0), 400, 0
    for _ in range(trials):
        change = generator.choice([-1, 0, 1], p=[lost, 1 - lost - gained, gained], size=n)
        pairs = (change <= 0) * generator.choice([True, False], size=n) | (change < 0)  # yes before; no change: either
        row = share_difference_row("d", pairs, (pairs + change) > 0, unit="", subject="")
        assert row["low"] < row["value"] < row["high"] or abs(row["value"]) == 1
        covered += row["low"] <= gained - lost <= row["high"]
    assert binomtest(covered, trials, 0.95, alternative="less").pvalue > 0.001


def test_a_seed_fixes_the_interval_and_constant_differences_have_no_width():
    rewards = np.random.default_rng(1).random(40)
    assert ratio_interval(rewards, np.ones(40), seed=7) == ratio_interval(rewards, np.ones(40), seed=7)
    row = difference_row("reward_difference", rewards, rewards + 0.25, unit="reward", subject="target:t/2", domain="d")
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.25, 0.25, 0.25), abs=1e-12)
    assert (row["n"], row["domain"], row["unit"]) == (40, "d", "reward")


def test_one_item_has_no_interval():
    assert np.isnan(ratio_interval([1.0], [1.0], seed=0)).all()


def test_a_large_sample_agrees_with_the_normal_interval():
    differences = np.random.default_rng(2).normal(0.3, 1.0, 20_000)
    low, high = ratio_interval(differences, np.ones_like(differences), seed=0)
    half = 1.959964 * differences.std() / np.sqrt(20_000)
    assert (low, high) == pytest.approx((differences.mean() - half, differences.mean() + half), abs=half / 15)


def test_paired_rows_state_both_means_and_their_difference():
    rows = paired_rows(
        ("accuracy_before", "accuracy_after", "accuracy_difference"),
        [0.0, 1.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 0.0],
        unit="share",
        subject="target:t/2",
    )
    assert [(r["figure"], r["value"], r["n"]) for r in rows] == [
        ("accuracy_before", 0.5, 4),
        ("accuracy_after", 0.75, 4),
        ("accuracy_difference", 0.25, 4),
    ]
    assert rows[2]["low"] == 0.0 and rows[2]["high"] > 0.25


@pytest.mark.parametrize("before, after", [([1.0], [1.0, 2.0]), ([], [])])
def test_unpaired_results_are_refused(before, after):
    for made in (difference_row, share_difference_row):
        with pytest.raises(ValueError, match="ask"):
            made("x", before, after, unit="", subject="")
