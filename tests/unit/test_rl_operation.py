"""How a run used its machine, from its step table."""

import pandas as pd
import pytest

from tasks.rl.operation import rows


def table(**changes) -> pd.DataFrame:
    columns = {
        "step_s": [10.0, 30.0],
        "publish_s": [0.5, 1.5],
        "sync_s": [0.5, 1.5],
        "sync_bytes": [8e9, 8e9],
        "transfer_s": [1.0, 2.0],
        "pause_s": [0.2, 0.1],
        "engine_idle_share": [0.5, 0.1],
        "trainer_idle_share": [0.2, 0.6],
        "tokens": [100.0, 300.0],
        "rollout_s": [5.0, 15.0],
        "rollouts": [8.0, 8.0],
        "length_max": [64.0, 80.0],
        "decode_share": [0.9, 0.7],
        "kv_cache_peak": [0.3, 0.6],
        "preemptions": [0.0, 2.0],
        "prefix_hit_rate": [float("nan"), 0.5],
        "mismatch_warning": [0.0, 1.0],
    }
    return pd.DataFrame(columns | changes)


def test_figures_of_two_steps():
    found = {r["figure"]: r for r in rows(table(), subject="target:smol/2", transport="shm", placement="colocated")}
    expected = {
        "weight_sync_bytes": 8e9,
        "weight_sync_bandwidth": 6e9,
        "weight_sync_pause_max": 0.2,
        "weight_sync_share": 0.1,
        "engine_idle_share": (0.5 * 10 + 0.1 * 30) / 40,  # by time, not by step
        "trainer_idle_share": (0.2 * 10 + 0.6 * 30) / 40,
        "rollout_tokens_per_second": 20.0,
        "rollout_length_max": 80.0,
        "decode_share": 0.8,
        "kv_cache_peak": 0.6,
        "preemptions": 2.0,
        "prefix_hit_rate": 0.5,
        "mismatch_steps_marked": 1.0,
    }
    assert {figure: r["value"] for figure, r in found.items()} == pytest.approx(expected)
    assert found["weight_sync_bandwidth"]["domain"] == "shm"
    assert found["engine_idle_share"]["domain"] == "colocated"
    assert (found["preemptions"]["n"], found["decode_share"]["n"]) == (16, 2)


def test_what_was_not_measured_is_left_out():
    unseen = table(kv_cache_peak=[float("nan")] * 2)
    labels = dict(subject="target:smol/2", transport="shm", placement="colocated")
    assert "kv_cache_peak" not in {r["figure"] for r in rows(unseen, **labels)}
    assert rows(unseen[:0], **labels) == []
