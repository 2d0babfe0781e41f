"""The `quantize` section: scheme and re-validation of quantized copies."""

from typing import Literal

from pydantic import Field

from infra.config.base import Section

ROUND_TO_NEAREST = "RTN"


class QuantizeConfig(Section):
    scheme: Literal["W8A8", "FP8_DYNAMIC", "W4A16", "NVFP4"] = "W8A8"
    """Scheme by its compressed-tensors name."""
    recipe: str = ROUND_TO_NEAREST
    """How weights are rounded: `RTN` to the nearest value, from the weights alone; or calibrated on the drafter's
    traffic by llm-compressor: `GPTQ`, `AWQ`, `SmoothQuant`, `PTQ`, or the path of a recipe of your own (YAML)."""
    calibration_texts: int = Field(128, ge=1)
    """Prompts of the drafter's traffic that a recipe is calibrated on; never those that quants are measured on."""
    ignore: list[str] = ["lm_head"]
    """Modules left alone: names, or `re:` patterns."""
    group_size: int = Field(64, ge=1)
    """Group size of W4A16; must divide the inputs of every layer. Kernels on GPUs take 32, 64 and 128."""
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
    held_out_problems: int = Field(64, ge=0)
    """Held-out problems of each RL environment that base and quant are asked, answers as long as `rl.max_new_tokens`; 0
    asks none. Environments that are played in several turns are left out."""
    retrain_drafter: bool = False
    """Train the target's drafter on the quant's own answers and states too, and measure it beside the kept one."""
    adopted: str = ""
    """Label of a copy that `lockstep register` adopted, such as `smol-quant/3`: it is measured, on the target that it
    names, in place of making one."""
    seed: int = 0
    """Seed of texts and questions."""
