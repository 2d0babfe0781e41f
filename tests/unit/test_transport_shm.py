import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from infra.transport.base import Published, SyncError
from infra.transport.checksum import checksum
from infra.transport.memory import Reader, Segment, SharedMemoryError
from infra.transport.shm import ShmSender


def fetched(published: Published) -> dict[str, torch.Tensor]:
    memory = torch.frombuffer(Reader(published.location, published.version).data, dtype=torch.uint8)
    return {
        p.name: memory[p.offset : p.offset + p.nbytes].view(getattr(torch, p.dtype)).view(p.shape).clone()
        for p in published.params
    }


def test_what_is_published_can_be_fetched():
    weights = {"a": torch.randn(7, 5), "b": torch.randn(3), "c": torch.randn(2, 3, 4, dtype=torch.bfloat16)}
    with ShmSender() as sender:
        published = Published.model_validate_json(sender.publish(3, weights.items()).model_dump_json())
        got = fetched(published)
        assert all(torch.equal(got[name], weights[name]) for name in weights)
        assert [p.checksum for p in published.params] == [checksum(v) for v in weights.values()]
        assert published.version == 3 and published.bytes == 7 * 5 * 4 + 3 * 4 + 24 * 2


def test_weights_are_published_in_the_engines_type():
    weights = {"a": torch.randn(7, 5)}
    with ShmSender("bfloat16") as sender:
        (meta,) = (published := sender.publish(1, weights.items())).params
        assert meta.dtype == "bfloat16"
        assert torch.equal(fetched(published)["a"], weights["a"].bfloat16())


def test_memory_is_reused_and_the_old_version_gone():
    with ShmSender() as sender:
        first = sender.publish(1, {"a": torch.ones(5)}.items())
        second = sender.publish(2, {"a": torch.zeros(5)}.items())
        assert first.location == second.location and first.sender == second.sender
        with pytest.raises(SharedMemoryError, match="version 1 was announced, but .* holds version 2"):
            Reader(first.location, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value):
    weights = {"fine": torch.ones(3), "bad": torch.tensor([1.0, value])}
    with ShmSender() as sender, pytest.raises(SyncError, match="bad holds values that are not finite"):
        sender.publish(1, weights.items())


def test_a_rewrite_is_noticed_before_and_while_reading():
    segment = Segment(100)
    segment.begin()
    with pytest.raises(SharedMemoryError, match="is being rewritten"):
        Reader(segment.location, 1)
    segment.commit(1)
    reader = Reader(segment.location, 1)
    assert reader.check() == reader.check()
    segment.begin()
    segment.commit(1)
    with pytest.raises(SharedMemoryError):
        reader.check()
    with pytest.raises(SharedMemoryError, match="version 2 was announced, but the published memory holds version 1"):
        reader.begin(2)
    reader.begin(1)
    assert reader.check()


def test_another_process_in_the_trainers_place_is_noticed(tmp_path):
    segment, other = Segment(100), Segment(100)
    segment.commit(1)
    other.commit(1)
    place = other.location.split("?")[0] + "?" + segment.location.split("?")[1]
    with pytest.raises(SharedMemoryError, match="another process took its place"):
        Reader(place, 1)


def test_memory_of_a_killed_trainer_is_gone_from_the_machine():
    code = (
        "import sys, time; from infra.transport.memory import Segment\n"
        "s = Segment(1 << 20); s.data[:4] = b'data'; s.commit(1); print(s.location, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        location = owner.stdout.readline().strip()
        reader = Reader(location, 1)
        files = {mapped.path for mapped in psutil.Process(owner.pid).memory_maps()}
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert bytes(reader.data[:4]) == b"data"  # whoever reads already may finish
    assert reader.check()
    with pytest.raises(SharedMemoryError, match="are gone .* did the trainer die"):
        Reader(location, 1)
    assert not [file for file in files if file.startswith("/dev/shm/") and os.path.exists(file)]
