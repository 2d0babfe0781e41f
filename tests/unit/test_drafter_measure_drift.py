"""What a measurement of drift says about its courses."""

from pathlib import Path

import pytest

from tasks.drafter.measure_drift import OLD, SCRATCH, WARM, Course, measured

HERE = Path("head")


def courses(warm: list[tuple[int, float]]) -> dict[str, Course]:
    scratch = [(0, 1.0), (500, 1.9), (1000, 2.19), (2000, 2.2)]
    served = {"all": (2.1, 90), "maths": (2.5, 30)}
    return {
        OLD: Course(warm[:1], HERE, {"all": (1.8, 100), "maths": (1.5, 40)}),
        WARM: Course(warm, HERE, served),
        SCRATCH: Course(scratch, HERE, served),
    }


def test_a_warm_start_is_compared_with_what_training_from_nothing_took():
    found = measured("t", courses([(0, 1.8), (50, 2.1), (100, 2.196)]))
    figures = {(row["figure"], row["domain"]): row["value"] for row in found.rows}
    assert figures["acceptance_lost", ""] == pytest.approx(0.4 / 2.2)
    assert figures["acceptance_recovered", ""] == pytest.approx(0.396 / 0.4)
    assert figures["tokens_of_scratch", ""] == pytest.approx(0.1)
    assert figures["served_acceptance_maths", OLD] == 1.5
    lost, back = found.findings
    assert "within 1% of that after 1000 tokens" in lost and "wins back 99% with 100 tokens, 10.0%" in back
    assert "95% of it after 100" in back
    assert [line["tokens trained on"] for line in found.table] == [0, 100, 2000]
    assert all(line["served, maths"] for line in found.table)


def test_what_was_not_lost_is_not_won_back():
    found = measured("t", courses([(0, 2.3), (100, 2.31)]))
    assert "acceptance_recovered" not in {row["figure"] for row in found.rows}
    (lost,) = found.findings
    assert "-4.5% are lost" in lost
    (partly,) = measured("t", courses([(0, 1.8), (100, 1.9)])).findings[1:]
    assert "wins back 25%" in partly and "of it after" not in partly
