"""Batches of random answers for a tiny model, shared by the tests of the trainer."""

from pathlib import Path

import numpy as np

from tasks.rl.batch import TrainingBatch, TrainingGroup
from tasks.rl.trainer import Trainer

VOCABULARY = 97


def write_model(folder: Path, kind: str = "llama") -> Path:
    """A Llama with a tied head or a Qwen3 without one, of two layers with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    config = LlamaConfig(**shape, tie_word_embeddings=True)
    if kind == "qwen3":
        config = Qwen3Config(**shape, head_dim=8, tie_word_embeddings=False)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def batch(temperature: float = 0.8, noise: float = 0.3) -> TrainingBatch:
    """Three groups of answers of different lengths, with log-probs that no model gave."""
    random = np.random.default_rng(5)
    groups = []
    for prompt, answers in ((9, [4, 7, 1, 6]), (3, [5, 5, 2]), (12, [8, 3, 3, 1, 2])):
        groups.append(
            TrainingGroup(
                random.integers(0, VOCABULARY, prompt),
                [random.integers(0, VOCABULARY, n) for n in answers],
                [-4.5 + noise * random.standard_normal(n) for n in answers],
                random.standard_normal(len(answers)).tolist(),
            )
        )
    return TrainingBatch(groups, temperature, longest=8)


def exact(trainer: Trainer, data: TrainingBatch) -> TrainingBatch:
    """The same batch as if an engine without mismatch had sampled it."""
    return TrainingBatch(
        [
            TrainingGroup(group.prompt_ids, group.answers, logprobs, group.advantages)
            for group, logprobs in zip(data.groups, trainer.logprobs(data), strict=True)
        ],
        data.temperature,
        data.longest,
    )
