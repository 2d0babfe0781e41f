"""What `lockstep measure transport` moves, and what it compares that with."""

import pytest
import torch

from infra.transport.sync import SyncReport
from tasks.evaluate.measurement import MeasureError
from tasks.measure.ceilings import Ceiling, ceiling, read_s
from tasks.measure.transport import TransportOptions, _findings, _line, _pictures, _plans, _rows, _said
from tasks.measure.ways import Update, ways
from tasks.measure.weights import Weights
from tasks.report.measurement import draw


def test_store_is_measured_with_whole_versions_and_with_changes():
    found = ways(["shm", "store"], 0.03, print)
    assert [(way.name, way.changed) for way in found] == [("shm", 1.0), ("store whole", 1.0), ("store change", 0.03)]
    with pytest.raises(MeasureError, match="--transports pigeon: there is no such transport; there are shm, ipc"):
        ways(["pigeon"], 0.03, print)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_as_many_values_change_as_are_said(tiny_llama, dtype):
    weights = Weights(tiny_llama, dtype)
    for share in (0.03, 1.0):
        before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        weights.change(share)
        changed = sum(int((tensor != before[name]).sum()) for name, tensor in weights.tensors.items())
        assert changed / sum(tensor.numel() for tensor in before.values()) == pytest.approx(share, rel=0.02)


def test_plain_copies_of_as_many_bytes_leave_nothing_behind(tmp_path):
    for transport, what in (("shm", "copy"), ("nccl", "broadcast"), ("store", "file read")):
        found = ceiling(transport, 2**20, 2, str(tmp_path))
        assert found.seconds > 0 and what in found.what
    assert torch.tensor(read_s(2**20, 1, str(tmp_path))).isfinite() and not list(tmp_path.iterdir())


def moved(name: str, billions: float, whole_s: float) -> tuple[dict, list[Update]]:
    """Three updates of a model in bfloat16, and their line of the table: half of the time is the transfer."""
    nbytes = int(2e9 * billions)
    parts = dict(prepare_s=0.7 * whole_s, pause_s=0.1 * whole_s, finalize_s=0.1, verify_s=0.1)
    report = SyncReport(version=1, transfer_s=0.5 * whole_s, bytes=nbytes, **parts)
    updates = [Update(0.2 * whole_s, nbytes, report)] * 3
    way = ways([name], 0.03, print)[0]
    return _line(f"random-{billions:g}b", way, nbytes, Ceiling(0.25 * whole_s, "copy in memory"), updates), updates


def test_a_table_says_what_each_transport_reached_and_a_plan_what_a_fleet_needs():
    found = [moved("shm", 1.0, 0.5), moved("shm", 2.0, 1.0), moved("ipc", 2.0, 0.5)]
    table = [line for line, _ in found]
    assert table[1]["GB"] == 4 and table[1]["whole, s"] == pytest.approx(1.0)
    assert table[1]["transfer, GB/s"] == pytest.approx(8.0) and table[1]["share of plain"] == pytest.approx(0.5)
    rows = {row["figure"]: row for row in _rows(*found[1])}
    assert rows["transport_pause_s"]["value"] == pytest.approx(0.1) and rows["transport_pause_s"]["n"] == 3
    assert rows["transport_share_of_copy"]["domain"] == "shm/random-2b"
    assert _said(table[1]) == "random-2b, shm: 1 s, pause 0.1 s; 8 GB/s, 50% of the plainest way"
    first, second = _findings(table)  # the fastest first, each on the largest model that it moved
    assert first.startswith("ipc brought 4 GB of random-2b up to date at 16 GB/s, 50% of the 32 GB/s")
    assert second.startswith("shm brought 4 GB") and "paused for 100 ms of it" in second
    planned, sentences = _plans(table, TransportOptions().fleet)
    assert {row["domain"] for row in planned} == {"shm", "ipc"} and len(sentences) == 2
    speed, pause, whole = _pictures(table)
    assert [line.name for line in speed.lines] == ["shm", "ipc", "copy in memory"] and speed.lines[2].beside == "shm"
    assert draw("a", speed).legend[2][1] == "dashed: copy in memory" and whole.log_x and pause.log_y
