"""Loops in answers, and the number of tokens to propose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate import evidence
from tasks.evaluate.best_k import best_rows, proposals, schedule, speedups
from tasks.evaluate.evidence import row
from tasks.evaluate.loops import fresh_passes, repeated


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_a_token_is_repeated_when_an_ngram_around_it_occurred_before(tokens, n):
    def occurred_before(start):
        gram = tokens[start : start + n]
        return len(gram) == n and any(tokens[i : i + n] == gram for i in range(start))

    expected = [any(occurred_before(s) for s in range(max(0, i - n + 1), i + 1)) for i in range(len(tokens))]
    assert repeated(tokens, n) == expected


def test_passes_inside_loops_are_left_out():
    loop = list(range(8))
    arrivals = [[90], [91, 92], loop[:4], loop[4:], [93], loop[:4], loop[4:], [94, 95, 96], [97]]
    # The first came with the prompt, the last may be cut; the second run through the loop is repetition.
    assert fresh_passes(arrivals, longest=4) == [2, 4, 4, 1, 3]
    assert fresh_passes(arrivals, longest=3) == [2, 1, 3], "two passes that arrived as one"
    assert fresh_passes([[1], [2]], longest=4) == []


def test_speedup_of_each_number_of_tokens():
    # 100 ms a pass, 130 with three proposed tokens: 10 ms each.
    assert speedups([0.8, 0.5, 0.1], 100.0, 130.0) == pytest.approx([1, 1.8 / 1.1, 2.3 / 1.2, 2.4 / 1.3])
    assert speedups([0.5], 10.0, 10.0) == [1, 1.5]


def measured(suffix, itl, rates=()):
    rows = [row(f"load_acceptance_rate_position_{i}", r, n=9, unit="", subject="d", domain="all")
            for i, r in enumerate(rates, 1)]  # fmt: skip
    rows += [row("load_acceptance_length", 1 + sum(rates), n=9, unit="", subject="d", domain="all")] * bool(rates)
    return [*rows, row(f"load_itl_p50{suffix}", itl, n=9, unit="ms", subject="d", domain="all")]


@pytest.mark.parametrize(("itl", "best"), [(110.0, 3), (170.0, 2), (400.0, 0)])
def test_the_best_number_follows_rates_and_costs(itl, best):
    labels = {"subject": "d", "concurrency": 4}
    rows = best_rows(measured("", itl, [0.8, 0.6, 0.2]), measured("_plain", 100.0), labels, prefix="load_")
    figures = {r["figure"]: r for r in rows}
    assert figures["load_best_num_speculative_tokens"]["value"] == best
    assert figures["load_speedup_at_best"]["value"] == max(speedups([0.8, 0.6, 0.2], 100.0, itl))
    assert all(r["n"] == 9 and r["concurrency"] == 4 for r in rows)
    assert best_rows(measured("", itl), measured("_plain", 100.0), labels, prefix="load_") == []


def test_rollouts_propose_what_was_measured_to_be_best():
    table = evidence.table(
        [
            row(f"{prefix}{figure}", value, n=9, unit="", subject=subject, concurrency=c)
            for prefix, c, tokens, speed, subject in [
                ("", 4, 3, 1.6, "drafter:t/1"),
                ("load_", 1, 3, 2.0, "drafter:t/1"),
                ("load_", 16, 1, 1.2, "drafter:t/1"),
                ("load_", 64, 0, 1.0, "drafter:t/1"),
                ("load_", 64, 3, 3.0, "drafter:t/1 on t/2"),
            ]
            for figure, value in (("best_num_speculative_tokens", tokens), ("speedup_at_best", speed))
        ],
        engine="e",
        hardware="h",
        command="c",
    )
    found = proposals(table, "drafter:t/1")
    assert [(p.concurrency, p.num_tokens, p.speedup) for p in found] == [
        (1, 3, 2.0),
        (4, 3, 1.6),
        (16, 1, 1.2),
        (64, 0, 1.0),
    ]
    assert schedule(found) == [(1, 3, 3), (4, 15, 3), (16, 63, 1), (64, 2**20, 0)]
