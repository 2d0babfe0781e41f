"""Checkpoints: a resumed trainer goes on bit for bit, and a commit is all or nothing."""

import numpy as np
import pytest
import torch

from infra.config.rl import RLConfig
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
    trainer_state.save(first, tmp_path)
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
    trainer_state.save(trainer, tmp_path)
    del trainer.model.model.layers[1]
    with pytest.raises(ValueError, match="checkpoint of another model"):
        trainer_state.load(trainer, tmp_path)


def test_commits_are_whole_kept_by_count_and_bound_to_their_configuration(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest() is None

    def save(folder):
        (folder / "weights").write_text("w")

    def broken(folder):
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    for step in (1, 2, 3):
        checkpoints.commit(step, save, {"version": step}, "digest")
    assert checkpoints.latest().name == "step-000003"
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-000002", "step-000003"]
    with pytest.raises(OSError, match="disk full"):
        checkpoints.commit(4, broken, {}, "digest")
    again = Checkpoints(tmp_path / "c", keep=2)  # as a restarted process finds it
    assert again.latest().name == "step-000003"
    assert again.state(again.latest(), "digest") == {"version": 3}
    with pytest.raises(CheckpointError, match="another configuration"):
        again.state(again.latest(), "other")
    again.commit(4, save, {"version": 4}, "digest")
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-000003", "step-000004"]
