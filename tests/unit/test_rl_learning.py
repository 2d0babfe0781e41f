"""Every loss learns: without an engine, the trainer samples from its own model."""

import numpy as np
import pytest
import torch
from rl_letters import LENGTH, LETTERS, write_model

from infra.config.rl import RLConfig
from tasks.rl.advantages import advantages
from tasks.rl.batch import TrainingBatch, TrainingGroup
from tasks.rl.losses import LOSSES
from tasks.rl.trainer import Trainer

PROMPTS, GROUP = 16, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("letters"))


def rollouts(trainer: Trainer, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sampled letters, their log-probs and rewards, each [PROMPTS, GROUP]."""
    with torch.no_grad():
        logp_PV = trainer.policy.causal(torch.from_numpy(prompts)).logits[:, -1].log_softmax(-1)
    sampled = torch.multinomial(logp_PV.exp(), GROUP, replacement=True)
    right = (prompts[:, -1:] + 1) % len(LETTERS)
    return sampled.numpy(), logp_PV.gather(1, sampled).double().numpy(), (sampled.numpy() == right).astype(float)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_what_depends_on_the_prompt(model, loss):
    estimator = "dr_grpo" if loss == "dr_grpo" else "grpo"
    trainer = Trainer(model, RLConfig(loss=loss, advantage=estimator, lr=3e-3, lr_warmup_steps=5, updates_per_step=3))
    random, means, clipped = np.random.default_rng(0), [], []
    for _ in range(80):
        prompts = random.integers(0, len(LETTERS), (PROMPTS, LENGTH))
        sampled, logprobs, rewards = rollouts(trainer, prompts)
        advantage = advantages(estimator, rewards.flatten(), np.repeat(np.arange(PROMPTS), GROUP)).reshape(
            PROMPTS, GROUP
        )
        groups = [
            TrainingGroup(prompts[n], list(sampled[n][:, None]), list(logprobs[n][:, None]), advantage[n].tolist())
            for n in range(PROMPTS)
        ]
        clipped.append(trainer.step(TrainingBatch(groups, 1.0, longest=1))["share_clip"])
        means.append(rewards.mean())
        if np.mean(means[-5:]) > 0.95:
            break
    assert means[0] < 0.2
    assert np.mean(means[-5:]) > 0.9
    assert max(clipped) > 0
