"""What `lockstep measure delta` finds of a change whose size is known."""

import pytest
import torch

from tasks.rl.measure_delta import DeltaOptions, _finding, _move, _rows


def test_a_change_is_moved_both_ways_and_nothing_is_left(tmp_path):
    random = torch.Generator().manual_seed(0)
    before = {"a": torch.randn(200, 50, generator=random), "b": torch.randn(10_000, generator=random)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["a"][:2] *= 2  # 100 of 20,000 values
    options = DeltaOptions(repeats=2, dtype="bfloat16")
    line = {"lr": 1e-5, "type": options.dtype} | _move(before, after, options, tmp_path)
    assert line["changed"] == pytest.approx(0.005) and line["whole, MB"] == pytest.approx(0.04, rel=0.01)
    assert line["smaller, times"] > 10 and min(line["whole, s"], line["change, s"]) > 0
    assert not list(tmp_path.iterdir())
    assert {row["figure"] for row in _rows([line], options)} >= {"delta_share_changed", "delta_change_s"}
    assert _finding(line).startswith("At lr 1e-05 one RL step changed 0.50% of the bfloat16 values")
