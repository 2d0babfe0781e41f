"""The `quantize` section: scheme and re-validation of quantized copies."""

from typing import Literal

from pydantic import Field

from infra.config.base import Section


class QuantizeConfig(Section):
    scheme: Literal["W8A8", "FP8_DYNAMIC", "W4A16"] = "W8A8"
    """Scheme by its compressed-tensors name."""
    ignore: list[str] = ["lm_head"]
    """Modules left alone: names, or `re:` patterns."""
    group_size: int = Field(64, ge=1)
    """Group size of W4A16; must divide the hidden size."""
    fidelity_prompts: int = Field(8, ge=1)
    """Texts per domain (the base's own answers) on which KL, flips and perplexity are measured."""
    fidelity_top_k: int = Field(64, ge=1)
    """Log-probs kept per position; the rest of the distribution is one bucket, so KL is a lower bound."""
    tasks: list[str] = Field(["hellaswag", "truthfulqa", "capitals", "gsm8k"], min_length=1)
    """Benchmarks of `tasks/evaluate/benchmarks` on which base and quant are compared."""
    task_questions: int = Field(64, ge=1)
    """Questions per benchmark, the same for base and quant; a smaller benchmark is asked whole."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest answer in words, tokens."""
    seed: int = 0
    """Seed of texts and questions."""
