"""When a drafter is kept, trained on or trained anew."""

import math

import pytest

from infra.config.watch import WatchConfig
from tasks.drafter.drift import Level, decide, levels, overall
from tasks.drafter.drift_text import terminal
from tasks.drafter.traffic import Prompt, Traffic
from tasks.drafter.watch import unseen

CONFIG = WatchConfig(refresh_above=0.03, retrain_above=0.3, retrain_below=1.1, min_drafts=50)


def level(value: float, n: int = 100, half: float = 0.0) -> dict[str, Level]:
    return {"all": Level(value=value, low=value - half, high=value + half, n=n)}


@pytest.mark.parametrize(
    ("before", "now", "decision"),
    [
        (level(2.0), level(2.0), "keep"),
        (level(2.0), level(1.95), "keep"),
        (level(2.0), level(2.4), "keep"),
        (level(2.0), level(1.93), "refresh"),
        (level(2.0), level(1.39), "retrain"),
        (level(1.15), level(1.09), "retrain"),  # little lost, but nothing left
        (level(2.0), level(2.0, n=49), "refresh"),  # too few to keep it
        ({}, level(1.5), "keep"),  # never measured before
        ({}, level(1.05), "retrain"),
        (level(2.0), {}, "retrain"),  # the engine drafted nothing
    ],
)
def test_what_was_lost_and_what_is_left_decide(before, now, decision):
    drift = decide(before, now, CONFIG)
    assert drift.decision == decision
    assert drift.drifted == (decision != "keep")
    assert drift.reason
    assert (drift.lost is None) == (not before or not now)


def test_the_share_lost_has_the_interval_of_a_ratio_of_two_means():
    drift = decide(level(2.0, half=0.2), level(1.5, half=0.09), CONFIG)
    spread = 0.75 * math.hypot(0.1, 0.06)
    assert (drift.lost, drift.lost_low, drift.lost_high) == pytest.approx((0.25, 0.25 - spread, 0.25 + spread))


def test_levels_are_those_of_the_subject_and_the_last_measurement_of_a_domain_counts():
    def row(domain: str, value: float, subject: str = "drafter:a/1", figure: str = "acceptance_length") -> dict:
        return dict(figure=figure, subject=subject, domain=domain, value=value, low=value, high=value, n=9)

    rows = [row("chat", 1.5), row("chat", 1.6), row("all", 2.0, "drafter:a/2"), row("chat", 9.0, figure="other")]
    assert {domain: found.value for domain, found in levels(rows, "drafter:a/1").items()} == {"chat": 1.6}
    assert overall(levels(rows, "drafter:a/1")).value == 1.6  # the only domain
    assert overall(levels([row("chat", 1.5), row("code", 1.6)])) is None


def test_fresh_prompts_are_none_that_a_drafter_trained_on():
    def prompts(*numbers: int, domain: str = "chat") -> list[Prompt]:
        return [Prompt(domain=domain, messages=[], token_ids=[number]) for number in numbers]

    benchmark = prompts(20, 21, 22, domain="mt_bench")  # more of these than of the others
    usual = Traffic(train=prompts(1, 2, 3), held_out=prompts(4, 9) + prompts(10, 11, domain="code") + benchmark)
    other = Traffic(held_out=prompts(2, 5) + benchmark, train=prompts(6, 7) + prompts(8, domain="code"))
    fresh = unseen(usual, other)
    assert {domain: [ids for (ids,) in found] for domain, found in fresh.held_out_ids().items()} == {
        "chat": [5, 6],
        "code": [8],
        "mt_bench": [20, 21, 22],
    }
    assert not fresh.train


def test_the_terminal_says_what_was_decided_why_and_from_what():
    drift = decide(level(2.0), level(1.9), CONFIG)
    first, why, header, row = terminal("a-drafter/1 on a/2", drift, None).splitlines()
    assert first == "a-drafter/1 on a/2: drifted: it is to be trained on"
    assert "5.0% of its acceptance length lost" in why
    assert decide(level(2.0), level(2.1), CONFIG).reason.startswith("5.0% of its acceptance length gained, within")
    assert header.split("  ")[1] == "domain"
    assert row.split() == ["all", "1.900", "1.900", "to", "1.900", "2.000", "5.0%", "100"]
