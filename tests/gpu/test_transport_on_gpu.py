"""What transports do otherwise with weights on a GPU: handles of its memory, sums by shape, pinned host memory."""

import subprocess
import sys

import pytest
import torch

from infra.transport.base import Reach
from infra.transport.checksum import checksum
from infra.transport.ipc import IpcSender
from infra.transport.pinned import host_memory
from infra.transport.store import StoreSender, StoreSource

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")

READER = """
import sys, torch
from infra.transport.base import Published
from infra.transport.checksum import checksum
from infra.transport.ipc import IpcSource
published = Published.model_validate_json(sys.stdin.read())
for _ in range(3):
    with IpcSource(torch.device("cuda")).open(published) as fetch:
        for meta in published.params:
            assert checksum(fetch(meta)) == meta.checksum, meta.name
"""


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    shapes = {"wide": (300, 7000), "tall": (9000, 64), "norm": (512,)}
    return {
        f"{name}.{n}": torch.randn(shape, generator=random, device="cuda")
        for n in range(3)
        for name, shape in shapes.items()
    }


def test_memory_that_another_process_opened_several_times_is_free_once_it_is_closed():
    tensors = weights(0)
    for values in tensors.values():
        checksum(values)  # what sums are weighted by stays on the GPU, for the next of this size
    held = torch.cuda.memory_allocated()
    with IpcSender("bfloat16") as sender:
        published = sender.publish(1, tensors.items())
        assert torch.cuda.memory_allocated() > held
        told = subprocess.run(
            [sys.executable, "-c", READER], input=published.model_dump_json(), capture_output=True, text=True
        )
        assert told.returncode == 0, told.stderr
    assert torch.cuda.memory_allocated() == held


def test_a_store_takes_weights_from_a_gpu_whole_and_as_a_change(tmp_path):
    assert host_memory(1000, pinned=True).is_pinned()
    source, now = StoreSource(torch.device("cpu")), weights(0)
    with StoreSender("bfloat16", Reach(folder=tmp_path)) as sender:
        for version in (1, 2, 3):
            now = now | {"wide.1": now["wide.1"] + version * torch.eye(300, 7000, device="cuda")}
            published = sender.publish(version, now.items())
            assert sender.manifest.base == (version - 1 or None)
            with source.open(published) as fetch:
                for meta in published.params:
                    values = now[meta.name].bfloat16()
                    assert torch.equal(fetch(meta), values.cpu()) and meta.checksum == checksum(values)
        now["norm.2"][7] = torch.nan
        with pytest.raises(RuntimeError, match="norm.2 holds values that are not finite"):
            sender.publish(4, now.items())
