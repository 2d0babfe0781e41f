"""Every loss learns: without an engine, the trainer samples from its own model."""

import itertools

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


@pytest.fixture(scope="module")
def prompts() -> tuple[np.ndarray, np.ndarray]:
    """All prompts of three letters in two parts: to train on, and a fifth that no step sees, each [n, LENGTH]."""
    every = np.array(list(itertools.product(range(len(LETTERS)), repeat=LENGTH)))
    np.random.default_rng(0).shuffle(every)
    return every[len(every) // 5 :], every[: len(every) // 5]


def right(prompts: np.ndarray) -> np.ndarray:
    """The letter that is asked for, [n]: it depends on the prompt alone."""
    return (prompts[:, -1] + 1) % len(LETTERS)


def next_letters(trainer: Trainer, prompts: np.ndarray) -> torch.Tensor:
    """Log-probs of every token as the answer, [n, vocabulary]."""
    with torch.no_grad():
        return trainer.policy.causal(torch.from_numpy(prompts)).logits[:, -1].log_softmax(-1)


def rollouts(trainer: Trainer, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sampled letters, their log-probs and rewards, each [PROMPTS, GROUP]."""
    logp_PV = next_letters(trainer, prompts)
    sampled = torch.multinomial(logp_PV.exp(), GROUP, replacement=True)
    rewards = (sampled.numpy() == right(prompts)[:, None]).astype(float)
    return sampled.numpy(), logp_PV.gather(1, sampled).double().numpy(), rewards


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_what_depends_on_the_prompt(model, prompts, loss):
    training, held_out = prompts
    estimator = "dr_grpo" if loss == "dr_grpo" else "grpo"
    trainer = Trainer(model, RLConfig(loss=loss, advantage=estimator, lr=1e-3, lr_warmup_steps=5, updates_per_step=3))

    def score() -> float:
        return float((next_letters(trainer, held_out).argmax(-1).numpy() == right(held_out)).mean())

    constant = np.bincount(right(held_out)).max() / len(held_out)
    assert constant < 0.3  # what the best answer that ignores its prompt scores
    assert score() < 0.2
    random, means, clipped = np.random.default_rng(0), [], []
    for _ in range(80):
        chosen = training[random.integers(0, len(training), PROMPTS)]
        sampled, logprobs, rewards = rollouts(trainer, chosen)
        advantage = advantages(estimator, rewards.flatten(), np.repeat(np.arange(PROMPTS), GROUP)).reshape(
            PROMPTS, GROUP
        )
        groups = [
            TrainingGroup(chosen[n], list(sampled[n][:, None]), list(logprobs[n][:, None]), advantage[n].tolist())
            for n in range(PROMPTS)
        ]
        clipped.append(trainer.step(TrainingBatch(groups, 1.0, longest=1))["share_clip"])
        means.append(rewards.mean())
        if np.mean(means[-5:]) > 0.95:
            break
    assert means[0] < 0.2
    assert np.mean(means[-5:]) > 0.9
    assert score() > 0.9
    assert max(clipped) > 0
