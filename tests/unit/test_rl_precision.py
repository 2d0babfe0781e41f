"""Options of the trainer that change what it costs, not what it learns: recomputation, bfloat16, adapters."""

import pytest
import torch
from rl_batches import VOCABULARY, batch, exact, write_model
from safetensors.torch import load_file

from infra.config.rl import LoRA, MismatchBounds, RLConfig
from tasks.rl import trainer_state
from tasks.rl.errors import TrainerError
from tasks.rl.trainer import Trainer

LAX = MismatchBounds(stop_k3=100.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_recomputing_activations_changes_nothing(model):
    plain, again = (
        Trainer(model, RLConfig(gradient_checkpointing=on, updates_per_step=2, lr=1e-3, mismatch=LAX))
        for on in (False, True)
    )
    one, other = plain.step(batch()), again.step(batch())
    for name in ("loss", "grad_norm", "entropy", "k3"):
        assert one[name] == other[name], name


def test_bfloat16_computes_with_rounded_weights_and_learns_in_float32(model):
    wide, narrow = (
        Trainer(model, RLConfig(trainer_dtype=dtype, lr=1e-5, mismatch=LAX)) for dtype in ("float32", "bfloat16")
    )
    one, other = wide.step(batch()), narrow.step(batch())
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)
    assert one["entropy"] != other["entropy"] == pytest.approx(one["entropy"], rel=0.01)
    before = dict(Trainer(model, RLConfig()).named_weights())
    for name, weight in narrow.named_weights():
        assert weight.dtype == torch.float32
        moved = (weight - before[name]).abs()
        # a step of lr, far below what bfloat16 resolves at these weights
        assert 0 < moved.max() < 2e-5, name


def test_adapters_learn_and_are_published_merged(model, tmp_path):
    settings = RLConfig(lora=LoRA(rank=4), lr=1e-2, kl_coefficient=0.1, mismatch=LAX)
    trainer, base = Trainer(model, settings), Trainer(model, RLConfig())
    before = dict(base.named_weights())
    for name, weight in trainer.named_weights():
        assert torch.equal(weight, before[name]), name  # an adapter begins at zero
    data = exact(trainer, batch())
    assert trainer.step(data)["kl"] == pytest.approx(0, abs=1e-9)
    assert trainer.step(data)["kl"] > 0  # the reference is the model without them

    merged = dict(trainer.named_weights())
    assert merged.keys() == before.keys()
    changed = {name for name, weight in merged.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in merged if "_proj" in name}
    trainer_state.export(trainer, model, tmp_path / "out")
    text = torch.arange(12)[None] * 7 % VOCABULARY
    with torch.no_grad():
        ours = trainer.policy.causal(text).logits
        exported = Trainer(tmp_path / "out", RLConfig()).policy.causal(text).logits
    torch.testing.assert_close(exported, ours, atol=1e-5, rtol=1e-5)

    trainer_state.write(trainer_state.snapshot(trainer), tmp_path)
    assert all(".lora_" in name for name in load_file(tmp_path / "weights-00000.safetensors"))
    resumed = Trainer(model, settings)
    trainer_state.load(resumed, tmp_path)
    assert resumed.step(data)["loss"] == trainer.step(data)["loss"]


@pytest.mark.parametrize("modules", [["no_such_layer"], ["q_proj", "lm_head"]])
def test_adapters_for_layers_that_take_none_are_refused(tmp_path, modules):
    with pytest.raises(TrainerError, match="rl.lora"):
        Trainer(write_model(tmp_path, "qwen3"), RLConfig(lora=LoRA(target_modules=modules)))


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM, GraniteConfig

    config = GraniteConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=8.0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(TrainerError, match="changes its logits"):
        Trainer(tmp_path, RLConfig())
