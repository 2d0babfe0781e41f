"""NCCL between two GPUs: versions for an engine on the other one, a sender that says nothing, two trainer ranks."""

import threading

import pytest
import torch
from rl_batches import batch, exact, write_model

from infra.cluster.placement import Placement, Resources
from infra.config.rl import MismatchBounds, RLConfig
from infra.transport.base import SAME_HOST, Reach, SyncError
from infra.transport.checksum import checksum
from infra.transport.group import Meeting, leave
from infra.transport.nccl import BUCKET_BYTES, NcclSender, NcclSource
from tasks.rl.remote import RemoteTrainer
from tasks.rl.trainer import Trainer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs are visible to torch")

EACH = Placement("disaggregated", "a test", Resources(), Resources(0, 1), 1)
HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """More than one bucket of them."""
    random = torch.Generator(HERE).manual_seed(seed)
    rows = BUCKET_BYTES // 1024
    return {f"{n}": torch.randn(rows, 300, generator=random, device=HERE) for n in range(3)}


def test_versions_arrive_on_the_other_gpu_and_a_new_engine_gets_the_last_one():
    source = NcclSource(THERE)
    with NcclSender("bfloat16", Reach(stall_s=60)) as sender:
        for version in (1, 2, 3):
            wanted = weights(version)
            published = sender.publish(version, wanted.items())
            with source.open(published) as fetch:
                for meta in published.params:
                    got = fetch(meta)
                    assert got.device == THERE and checksum(got) == meta.checksum
                    assert torch.equal(got.cpu(), wanted[meta.name].bfloat16().cpu())
        again = sender.offer(1)
        with NcclSource(THERE).open(again) as fetch:
            assert all(checksum(fetch(meta)) == meta.checksum for meta in again.params)


def test_a_sender_that_stalls_is_cut_off_and_what_is_offered_again_arrives():
    source = NcclSource(THERE)
    with NcclSender("bfloat16", Reach(stall_s=30)) as sender:
        published = sender.publish(1, weights(1).items())
        with source.open(published):
            pass
        # The same store, another group, and a trainer that joins it, sends the number and then nothing.
        location = published.location.replace("/0?", "/stalled?").replace("stall_s=30", "stall_s=3")
        held = []

        def stall() -> None:
            group = Meeting(location, sender._store).join(HERE, trainer=True)
            held.append((group, group.broadcast([torch.ones(1, dtype=torch.int64, device=HERE)])))

        stalled = threading.Thread(target=stall)
        stalled.start()
        with (
            pytest.raises(SyncError, match="did not arrive within 3 s: it stalled"),
            source.open(published.model_copy(update={"location": location})),
        ):
            pass
        stalled.join()
        leave(held[0][0], HERE)
        again = sender.offer(1)
        with source.open(again) as fetch:
            assert all(checksum(fetch(meta)) == meta.checksum for meta in again.params)


def test_two_ranks_compute_what_one_does(tmp_path, run):
    model = write_model(tmp_path / "model")
    settings = RLConfig(micro_batch_tokens=33, lr=1e-3, mismatch=MismatchBounds(stop_k3=100.0))
    alone = Trainer(model, settings)
    data = exact(alone, batch())
    expected = [alone.step(data), alone.step(data)]

    async def train_two() -> None:
        two = RemoteTrainer(model, settings, "float32", SAME_HOST, EACH, ranks=2)
        await two.ready()
        for wanted in expected:
            found = await two.step(data)
            for figure in ("loss", "grad_norm", "entropy", "k3"):
                assert found[figure] == pytest.approx(wanted[figure], rel=1e-3, abs=1e-4), figure
        await two.export(tmp_path / "two")
        await two.close()

    run(train_two())
    assert (tmp_path / "two" / "model.safetensors").exists()
