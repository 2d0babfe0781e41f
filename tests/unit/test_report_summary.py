"""From evidence to the summary, and the small parts the pictures are made of."""

import math

import pytest
import report_sample as sample
from hypothesis import given
from hypothesis import strategies as st

from tasks.report.headline import headline, tiles
from tasks.report.plots.svg import Bands, Linear, Log, number
from tasks.report.plots.time import seconds_by_kind
from tasks.report.rollouts import SHOWN, groups, weights
from tasks.report.summary import GateVerdict, MismatchStep, Phase, Released


def test_acceptance_is_split_into_before_after_and_on_the_quant():
    s = sample.summary()
    after = s.acceptance.after["maths"]
    assert after.length == pytest.approx(2.21) and after.n == 182
    assert 1 + sum(after.by_position) == pytest.approx(after.length)
    assert s.acceptance.before["maths"].length == pytest.approx(1.02)
    assert s.acceptance.on_quant["maths"].length == pytest.approx(2.17)


def test_comparisons_are_paired_by_domain():
    s = sample.summary()
    assert s.rewards["products"].difference.low == pytest.approx(-0.03)
    assert s.quant.tasks["hellaswag"].before.value == pytest.approx(0.33)
    assert s.quant.tasks["hellaswag"].before.low is None


def test_worst_mismatch_over_the_steps():
    worst = sample.summary().mismatch.worst
    assert worst == pytest.approx({"k3": 3.4e-10, "max_ratio": 1.00005, "ess": 0.9999998})


def test_unknown_numbers_become_null():
    step = MismatchStep(step=1, k3=float("nan"), max_ratio=1.0, ess=float("inf"))
    assert step.k3 is None and step.ess is None


def test_a_misspelt_field_is_refused():
    with pytest.raises(ValueError, match="aplha"):
        sample.summary(released=Released(**{"aplha": True}))


def test_overhead_is_what_no_span_of_this_run_covers():
    s = sample.summary()
    covered = sum(sum(p.spans.values()) for name, p in s.phases.items() if name != "drafter")
    assert s.overhead["seconds"] == pytest.approx(s.wall_s - covered)
    assert s.overhead["share"] == pytest.approx(s.overhead["seconds"] / s.wall_s)


def test_a_phase_splits_into_its_seconds():
    phase = Phase(seconds=10, spans={"engine": 6, "sync": 1.5})
    assert seconds_by_kind(phase) == {"engine": 6, "sync": 1.5, "overhead": 2.5}


def test_headline_names_what_was_released():
    assert headline(sample.summary()) == "smol v2 ← v1 released with quant v1"
    assert headline(sample.summary(released=Released(target=True))) == "smol v2 ← v1 released alone"
    assert headline(sample.summary(verdict="refused")) == "smol v2 ← v1: release refused"


def test_overall_acceptance_is_the_measured_one_or_weighs_domains_by_drafts():
    s = sample.summary()
    assert ("acceptance length", "1.02 → 1.73") in [(t["name"], t["value"]) for t in tiles(s)]
    del s.acceptance.after["all"]
    (tile,) = [t for t in tiles(s) if t["name"] == "acceptance length"]
    after = s.acceptance.after.values()
    mean = sum(a.length * a.n for a in after) / sum(a.n for a in after)
    assert tile["value"].endswith(number(mean))


def test_gate_verdicts_are_taken_as_the_release_room_gives_them():
    from tasks.release.gates import Verdict

    given = Verdict(name="g", part="safety", figure="f", comparison="==", bound=0.0, verdict="fail", counts=True)
    (taken,) = sample.summary(verdicts=[GateVerdict.model_validate(given.model_dump())]).gates
    assert taken.model_dump() == given.model_dump()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.047, "0.047"), (3.4e-10, "3.4e−10"), (1.0, "1"), (-0.0312, "−0.0312"), (12345.6, "12,346"), (100.0, "100"),
     (0, "0"), (None, "–"), (math.nan, "–")],
)  # fmt: skip
def test_numbers_are_written_as_people_write_them(value, text):
    assert number(value) == text


@given(st.floats(1e-12, 1e12), st.booleans())
def test_numbers_keep_their_leading_digits(value, negative):
    value = -value if negative else value
    read = float(number(value).replace("−", "-").replace(",", ""))
    assert read == pytest.approx(value, rel=0.06)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_linear_scales_hold_their_data(a, b):
    low, high = sorted((a, b))
    scale = Linear(low, high)
    assert -1e-9 <= scale.at(low) <= scale.at(high) <= 1 + 1e-9
    assert 2 <= len(scale.ticks) <= 8


@given(st.floats(1e-12, 1e3), st.floats(1, 1e12))
def test_log_scales_hold_their_data(low, factor):
    scale = Log(low, low * factor)
    assert -1e-6 <= scale.at(low) <= scale.at(low * factor) <= 1 + 1e-6
    assert scale.at(0.0) == 0.0


def test_the_first_band_is_on_top():
    bands = Bands(["a", "b"])
    assert bands.at(("a", 0)) > bands.at(("b", 0))


def test_rollouts_are_grouped_by_step_and_prompt():
    found = groups(sample.rollouts())
    assert len(found) == 12 and all(len(g["rows"]) == 8 for g in found)
    assert all(g["mixed"] == (len({r["reward"] for r in g["rows"]}) > 1) for g in found)


def test_many_rollouts_are_thinned_over_all_steps():
    many = [r | {"step": step} for step in range(30) for r in sample.rollouts()]
    shown = groups(many)
    assert sum(len(g["rows"]) for g in shown) <= SHOWN
    assert {g["step"] for g in shown} >= {0, 28}


@pytest.mark.parametrize(
    ("version", "text"),
    [("v2", "v2"), ([["v2", 0, 10]], "v2"), ([("v2", 0, 10), ("v3", 10, 16)], "v2 0-10, v3 10-16"), (3, "3"), ([], "")],
)
def test_weight_versions_in_words(version, text):
    assert weights(version) == text


def test_a_group_whose_scorer_failed_is_shown_without_a_mean():
    failed = [r | {"reward": None, "advantage": None} for r in sample.rollouts()[:8]]
    (group,) = groups(failed)
    assert group["mean"] is None and not group["mixed"]
    assert number(group["rows"][0]["reward"]) == "–"
