"""The `release` section: gates, and how a release is served."""

from typing import Literal

from pydantic import Field

from infra.config.base import Section


class Gate(Section):
    """A rule over evidence: `figure` (and `domain`) compared with `bound`."""

    name: str
    """Shown in verdicts."""
    part: Literal["target", "drafter", "quant", "safety"]
    """What a failure costs: target and safety refuse the release, drafter and quant release without that part."""
    figure: str
    """Figure of the evidence table."""
    domain: str = "*"
    """Domain of the figure; `*` judges every domain that was measured."""
    side: Literal["value", "low", "high"] = "value"
    """What is compared: the value, or an end of its confidence interval."""
    comparison: Literal[">=", "<=", ">", "<", "=="]
    """How it must stand to the bound."""
    bound: float
    """The bound, in the figure's unit."""
    min_n: int = Field(1, ge=1)
    """Smallest sample that may decide."""
    on_undecided: Literal["refuse", "warn"] = "refuse"
    """What a missing figure, or one measured on fewer than `min_n` samples, does."""


DEFAULT_GATES = [
    Gate(
        name="held-out reward not worse",
        part="target",
        figure="reward_difference",
        side="high",
        comparison=">=",
        bound=0.0,
        min_n=16,
    ),
    Gate(
        name="general questions not worse",
        part="target",
        figure="task_difference",
        side="high",
        comparison=">=",
        bound=0.0,
        min_n=16,
    ),
    Gate(name="mismatch k3 small", part="target", figure="mismatch_k3_max", comparison="<=", bound=1e-2),
    Gate(name="drafter accepts", part="drafter", figure="acceptance_length", comparison=">=", bound=1.3),
    Gate(name="greedy output identical", part="drafter", figure="output_identity", comparison=">=", bound=0.99),
    Gate(name="speculation pays", part="drafter", figure="speculation_speedup", comparison=">", bound=1.0),
    Gate(name="quant KL small", part="quant", figure="quant_kl", comparison="<=", bound=0.1),
    Gate(
        name="quant task accuracy not worse",
        part="quant",
        figure="quant_task_difference",
        side="high",
        comparison=">=",
        bound=0.0,
        min_n=16,
    ),
]


class ReleaseConfig(Section):
    gates: list[Gate] = DEFAULT_GATES
    """Rules the evidence must satisfy."""
    host: str = "127.0.0.1"
    """Address the released engine listens on."""
    port: int = Field(0, ge=0, le=65535)
    """Its port; 0 takes a free one."""
    questions: list[str] = Field(
        ["What is the capital of France?", "Write a Python function that adds two numbers.", "What is 7 times 8?"],
        min_length=1,
    )
    """Asked over HTTP before the alias moves."""
    keep_serving: bool = False
    """Leave the released engine running when the flow ends (it is stopped by `lockstep down`)."""
