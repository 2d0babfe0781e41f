"""Packing and the trainer on a tiny model: the same figures as one answer a row, whatever the micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_batches import batch, exact, write_model

from infra.config.rl import MismatchBounds, RLConfig
from tasks.rl.batch import TrainingBatch, TrainingGroup
from tasks.rl.errors import MismatchError, TrainerError
from tasks.rl.losses import LOSSES
from tasks.rl.packing import pack
from tasks.rl.trainer import Trainer

LAX = MismatchBounds(stop_k3=100.0)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), request.param)


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(0, 9), min_size=1, max_size=6)), min_size=1, max_size=6
    ),
    st.integers(4, 60),
)
def test_packing_holds_every_answer_once_within_the_budget(shapes, max_tokens):
    groups = [
        TrainingGroup(np.arange(p), [np.arange(a) for a in n], [np.zeros(a) for a in n], [0.0] * len(n))
        for p, n in shapes
    ]
    packed = pack(groups, max_tokens)
    held = sorted(pair for micro in packed for pair in micro.answers)
    assert held == [
        (g, a) for g, group in enumerate(groups) for a in range(len(group.answers)) if len(group.answers[a])
    ]
    for micro in packed:
        assert len(micro.input_T) <= max_tokens or len(micro.answers) == 1
        assert (micro.position_T[micro.row_N] >= 0).all()


def test_logprobs_are_those_of_one_answer_a_row(model):
    trainer, data = Trainer(model, RLConfig(micro_batch_tokens=40)), batch(temperature=0.7)
    for group, answers in zip(data.groups, trainer.logprobs(data), strict=True):
        for answer, ours in zip(group.answers, answers, strict=True):
            text = torch.from_numpy(np.concatenate([group.prompt_ids, answer]))[None]
            with torch.no_grad():
                logits = trainer.policy.causal(text).logits[0, len(group.prompt_ids) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1).gather(1, torch.from_numpy(answer)[:, None])[:, 0]
            np.testing.assert_allclose(ours, expected.numpy(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_does_not_depend_on_micro_batches(model, loss):
    figures = []
    for size in (16, 33, 4096):
        settings = RLConfig(
            micro_batch_tokens=size, loss=loss, correction="mis_sequence", updates_per_step=2, lr=1e-3, mismatch=LAX
        )
        trainer = Trainer(model, settings)
        data = exact(trainer, batch())
        data.groups[1].logprobs[0][:] -= 1.5  # a sequence that mis_sequence drops
        data.groups[2].logprobs[0][:] += 0.3
        figures.append(trainer.step(data))
    assert figures[0]["micro_batches"] > figures[1]["micro_batches"] > figures[2]["micro_batches"] == 1
    assert 0 < figures[0]["share_dropped"] < 0.2
    for other in (1, 2):
        assert figures[other]["loss"] == pytest.approx(figures[0]["loss"], abs=1e-6)
        assert figures[other]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], abs=1e-5)


def test_the_gradient_is_that_of_the_plain_policy_gradient(model):
    """On its own samples, without clipping at work, a step of dapo is -A * logp averaged over all tokens."""
    trainer = Trainer(model, RLConfig(loss="dapo", correction="none", max_grad_norm=1e9, micro_batch_tokens=16))
    data = exact(trainer, batch(temperature=1.0))
    figures = trainer.step(data)
    ours = {name: p.grad.clone() for name, p in trainer.policy.causal.named_parameters()}
    plain = Trainer(model, RLConfig())
    total, tokens = 0.0, 0
    for group in data.groups:
        for answer, advantage in zip(group.answers, group.advantages, strict=True):
            text = torch.from_numpy(np.concatenate([group.prompt_ids, answer]))[None]
            logits = plain.policy.causal(text).logits[0, len(group.prompt_ids) - 1 : -1]
            total = total - advantage * logits.log_softmax(-1).gather(1, torch.from_numpy(answer)[:, None]).sum()
            tokens += len(answer)
    (total / tokens).backward()
    for name, p in plain.policy.causal.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=1e-6, rtol=1e-4)
    assert figures["k3"] < 1e-9 and figures["ess"] == pytest.approx(1)


def test_tokens_without_a_finite_logprob_are_left_out_and_counted(model):
    trainer = Trainer(model, RLConfig(micro_batch_tokens=40))
    data = exact(trainer, batch())
    data.groups[0].logprobs[1][2] = -np.inf
    data.groups[2].logprobs[0][:] = np.nan
    figures = trainer.step(data)
    assert figures["nonfinite"] == 1 + 8
    assert np.isfinite(figures["loss"]) and np.isfinite(figures["grad_norm"]) and figures["k3"] < 1e-9


@pytest.mark.parametrize(
    "bound", [{"stop_k3": 0.01}, {"stop_mean_abs": 0.03}, {"stop_max_ratio": 1.5}, {"stop_ess": 0.89}]
)
def test_a_large_mismatch_stops_before_the_update(model, bound):
    ((name, value),) = bound.items()
    trainer = Trainer(model, RLConfig(mismatch=MismatchBounds(**{"stop_k3": 100.0} | bound)))
    before = [w.clone() for _, w in trainer.named_weights()]
    with pytest.raises(MismatchError, match=f"rl.mismatch.{name}={value:g}"):
        trainer.step(batch())
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.named_weights(), strict=True))


def test_the_kl_penalty_is_zero_at_the_start_and_grows(model):
    trainer = Trainer(model, RLConfig(kl_coefficient=0.1, lr=1e-2, updates_per_step=2))
    assert trainer.step(exact(trainer, batch()))["kl"] > 0
    once = Trainer(model, RLConfig(kl_coefficient=0.1))
    assert once.step(exact(once, batch()))["kl"] == pytest.approx(0, abs=1e-9)


def test_warmup_and_a_batch_without_answers(model):
    trainer = Trainer(model, RLConfig(lr=4e-4, lr_warmup_steps=4))
    assert [trainer.step(TrainingBatch([], 1.0, 8))["lr"] for _ in range(6)] == pytest.approx(
        [1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4]
    )


def test_a_model_with_sliding_windows_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(TrainerError, match="sliding_attention"):
        Trainer(tmp_path, RLConfig())
