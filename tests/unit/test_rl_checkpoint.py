"""Checkpoints: a resumed trainer goes on bit for bit, and a commit is all or nothing."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.config.flows import RLFlowConfig
from infra.config.rl import RLConfig
from infra.services.runs import config_digest
from tasks.rl import trainer_state
from tasks.rl.batch import TrainingBatch, TrainingGroup
from tasks.rl.checkpoint import CheckpointError, Checkpoints
from tasks.rl.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def batch(seed: int) -> TrainingBatch:
    random = np.random.default_rng(seed)
    answers = [random.integers(0, 50, n) for n in (3, 5, 4)]
    logprobs = [np.full(len(answer), -np.log(50)) for answer in answers]
    return TrainingBatch(
        [TrainingGroup(random.integers(0, 50, 6), answers, logprobs, random.standard_normal(3).tolist())], 1.0, 5
    )


def test_a_resumed_trainer_continues_bit_for_bit(model, tmp_path):
    settings = RLConfig(lr=1e-2, lr_warmup_steps=4, weight_decay=0.1, updates_per_step=2)
    whole = Trainer(model, settings)
    figures = [whole.step(batch(n)) for n in range(5)]
    first = Trainer(model, settings)
    for n in range(2):
        first.step(batch(n))
    random_state = torch.get_rng_state()
    trainer_state.write(trainer_state.snapshot(first), tmp_path)
    second = Trainer(model, settings)
    torch.manual_seed(99)
    trainer_state.load(second, tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    for n in range(2, 5):
        again = second.step(batch(n))
        for name in ("loss", "grad_norm", "lr", "k3"):
            assert again[name] == figures[n][name], name
    for (name, ours), (_, expected) in zip(second.named_weights(), whole.named_weights(), strict=True):
        assert torch.equal(ours, expected), name


def test_an_exported_policy_is_a_model_folder_with_the_tokenizer(model, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = Trainer(model, RLConfig(lr=1e-2))
    trainer.step(batch(0))
    trainer_state.export(trainer, model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).named_parameters())
    for name, weight in trainer.named_weights():
        assert torch.equal(weight, loaded[name]), name
    original = dict(Trainer(model, RLConfig()).named_weights())
    assert any(not torch.equal(weight, original[name]) for name, weight in loaded.items())


def test_a_checkpoint_of_another_model_is_refused(model, tmp_path):
    trainer = Trainer(model, RLConfig())
    trainer_state.write(trainer_state.snapshot(trainer), tmp_path)
    del trainer.policy.causal.model.layers[1]
    with pytest.raises(ValueError, match="checkpoint of another model"):
        trainer_state.load(trainer, tmp_path)


PINS = {"engine": "vllm 1.0", "torch": "2.0"}


def checkpoints(folder: Path, digest: str = "digest", pins: dict = PINS, **more) -> Checkpoints:
    return Checkpoints(folder, 2, digest, pins, **more)


def test_commits_are_whole_kept_by_count_and_bound_to_their_configuration(tmp_path, run):
    async def save(folder):
        (folder / "weights").write_text("w")

    async def broken(folder):
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    async def write_four() -> None:
        async with checkpoints(tmp_path) as kept:
            assert kept.latest() is None
            for step in (1, 2, 3):
                await kept.commit(step, save, {"version": step})
            await kept.written()
            assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
            await kept.commit(4, broken, {})

    with pytest.raises(CheckpointError, match=r"checkpoint of step 4.*disk full; the last good one is .*step-000003"):
        run(write_four())
    again = checkpoints(tmp_path)  # as a restarted process finds it
    assert again.latest().name == "step-000003"
    assert again.state(again.latest()) == ({"version": 3}, [])
    with pytest.raises(CheckpointError, match="another configuration"):
        checkpoints(tmp_path, "other").state(again.latest())

    async def go_on() -> None:
        async with again:
            await again.commit(4, save, {"version": 4})

    run(go_on())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_training_goes_on_while_a_checkpoint_is_written_and_hears_of_its_failure(tmp_path, run):
    async def steps() -> None:
        release, started = asyncio.Event(), asyncio.Event()

        async def slow(folder):
            started.set()
            await release.wait()
            raise OSError("disk full")

        async with checkpoints(tmp_path) as kept:
            await kept.commit(1, slow, {})
            await started.wait()
            kept.check()  # a step: nothing to say yet
            assert kept.latest() is None
            release.set()
            await asyncio.wait([kept._writing])
            kept.check()

    with pytest.raises(CheckpointError, match="disk full"):
        run(steps())


def test_another_engine_is_refused_unless_allowed_and_then_named(tmp_path, run):
    async def save(folder):
        pass

    async def commit() -> None:
        async with checkpoints(tmp_path) as kept:
            await kept.commit(1, save, {"version": 1})

    run(commit())
    other = {"engine": "vllm 1.1", "torch": "2.0", "driver": "595"}
    latest = checkpoints(tmp_path).latest()
    with pytest.raises(CheckpointError, match=r"driver none -> 595; engine vllm 1.0 -> vllm 1.1.*other_pins=true"):
        checkpoints(tmp_path, pins=other).state(latest)
    state, changed = checkpoints(tmp_path, pins=other, any_pins=True).state(latest)
    assert state == {"version": 1} and len(changed) == 2
    asked = [RLFlowConfig(rl=RLConfig(resume_under_other_pins=allowed)) for allowed in (False, True)]
    assert config_digest("rl", asked[0]) == config_digest("rl", asked[1])  # so the interrupted run is found
