"""A trainer of two processes computes what one computes, and each goes on from the other's checkpoint."""

import asyncio

import numpy as np
import pytest
import torch
from rl_batches import batch, exact, write_model
from safetensors.torch import load_file

from infra.cluster.placement import Placement, Resources
from infra.config.rl import MismatchBounds, RLConfig
from infra.transport.base import SAME_HOST, Published
from infra.transport.nccl import NcclSource
from tasks.rl import trainer_state
from tasks.rl.packing import pack, share
from tasks.rl.remote import RemoteTrainer
from tasks.rl.trainer import Trainer

SHARED = Placement("colocated", "a test", Resources(), Resources(0.25), 1)
SETTINGS = RLConfig(
    micro_batch_tokens=33,
    loss="gspo",
    correction="mis_sequence",
    updates_per_step=2,
    lr=1e-3,
    kl_coefficient=0.1,
    mismatch=MismatchBounds(stop_k3=100.0),
)
LATER = 1e-5
"""AdamW divides by the size of a gradient, and so magnifies what rounding does to the smallest."""
FIGURES = ("loss", "kl", "grad_norm", "entropy", "share_clip", "k1", "k3", "ess", "share_dropped", "nonfinite")


def assert_same(one: dict, other: dict, bound: float) -> None:
    """bound: relative, and absolute for small figures."""
    for name in FIGURES:
        assert one[name] == pytest.approx(other[name], abs=bound, rel=bound), name


def assert_weights(trainer: Trainer, folder) -> None:
    found = load_file(folder / "model.safetensors")
    for name, weight in trainer.named_weights():
        torch.testing.assert_close(found[name], weight, atol=LATER, rtol=0)


def received(source: NcclSource, published: Published) -> dict[str, torch.Tensor]:
    with source.open(published) as fetch:
        return {meta.name: fetch(meta).clone() for meta in published.params}


def test_ranks_get_as_many_micro_batches_of_about_the_same_size():
    groups = batch().groups
    whole = sum(len(micro.input_T) for micro in pack(groups, 4096))
    micro_batches = pack(groups, 4096, ranks=2)
    assert sorted(pair for micro in micro_batches for pair in micro.answers) == sorted(
        (g, a) for g, group in enumerate(groups) for a in range(len(group.answers))
    )
    sizes = [sum(len(micro.input_T) for micro in share(micro_batches, rank, 2)) for rank in range(2)]
    assert max(sizes) < 0.7 * whole
    assert len(pack(groups[1:2], 4096, ranks=3)) == 3 and len(pack([], 4096, ranks=3)) == 0


def test_two_ranks_compute_what_one_computes_and_continue_each_other(tmp_path, run):
    model = write_model(tmp_path / "model")
    alone = Trainer(model, SETTINGS)
    data = exact(alone, batch())
    data.groups[1].logprobs[0][:] -= 1.5  # a sequence that mis_sequence drops
    data.groups[0].logprobs[1][2] = -np.inf
    expected = [alone.step(data)]
    alone_saved = tmp_path / "alone"
    alone_saved.mkdir()
    trainer_state.write(trainer_state.snapshot(alone), alone_saved)
    expected.append(alone.step(data))

    async def train_two() -> None:
        two = RemoteTrainer(model, sharded, "float32", SAME_HOST, SHARED, ranks=2)
        await two.ready()
        figures = await two.step(data)
        assert figures["micro_batches"] == 4
        assert_same(figures, expected[0], 5e-6)
        await two.snapshot()
        writing = asyncio.ensure_future(two.write(saved))
        assert_same(await two.step(data), expected[1], LATER)  # training goes on: the snapshot stays
        await writing
        parts = [load_file(saved / f"optimizer-{rank:05d}.safetensors") for rank in range(2)]
        for name, moment in load_file(alone_saved / "optimizer-00000.safetensors").items():
            if name.endswith("exp_avg"):  # a sum of gradients
                torch.testing.assert_close(torch.cat([part[name] for part in parts]), moment, atol=1e-6, rtol=0)

        published = await two.publish(7, 1)
        assert published.location.count("tcp://") == 2  # each rank sends its share
        first = await asyncio.to_thread(received, source, published)
        again = await asyncio.to_thread(received, source, await two.offer(1))
        for name, weight in alone.named_weights():
            torch.testing.assert_close(first[name], weight, atol=LATER, rtol=0)
            assert torch.equal(first[name], again[name])

        await two.load(alone_saved)
        assert_same(await two.step(data), expected[1], LATER)
        await two.export(tmp_path / "two")
        await two.close()

    saved, source = tmp_path / "saved", NcclSource(torch.device("cpu"))
    sharded = SETTINGS.model_copy(update={"transport": "nccl", "transport_sharded": True})
    saved.mkdir()
    run(train_two())
    assert_weights(alone, tmp_path / "two")
    resumed = Trainer(model, SETTINGS)
    trainer_state.load(resumed, saved)
    assert_same(resumed.step(data), expected[1], LATER)
    assert_weights(resumed, tmp_path / "two")
