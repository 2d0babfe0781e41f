"""The `release` section: gates, and how a release is served."""

from typing import Literal

from pydantic import Field, model_validator

from infra.config.base import Section

Part = Literal["target", "drafter", "quant", "safety"]


class Gate(Section):
    """A rule over evidence: `figure` (and `domain`) compared with `bound`."""

    name: str
    """Shown in verdicts."""
    part: Part
    """What a failure costs: target and safety refuse the release, drafter and quant release without that part."""
    figure: str
    """Figure of the evidence table."""
    domain: str = "*"
    """Domain of the figure; `*` judges every domain that was measured."""
    by: Literal["value", "interval"] = "value"
    """`value` compares the value alone. `interval` compares the 95% interval: it passes when all of it keeps the bound,
    fails when none of it does, and is undecided when the bound lies inside."""
    comparison: Literal[">=", "<=", ">", "<", "=="]
    """How it must stand to the bound."""
    bound: float
    """The bound, in the figure's unit."""
    min_n: int = Field(1, ge=1)
    """Smallest sample that may decide, in the figure's own unit."""
    on_undecided: Literal["refuse", "warn"] = "refuse"
    """What an undecided verdict does: count as a failure, or be reported only. A figure never measured is a failure."""
    against_parent: bool = False
    """The figure compares a target with the version it was trained from: not judged for a version without one."""

    @model_validator(mode="after")
    def _check(self):
        if self.by == "interval" and self.comparison == "==":
            raise ValueError(
                f"gate {self.name!r}: an interval cannot equal its bound; use by=value or another comparison"
            )
        return self


DEFAULT_GATES = [
    Gate(name="lineage intact", part="safety", figure="lineage_problems", comparison="==", bound=0),
    Gate(
        name="measured against the champion",
        part="target",
        figure="parent_is_champion",
        comparison="==",
        bound=1,
        against_parent=True,
    ),
    Gate(
        name="held-out reward not worse",
        part="target",
        figure="reward_difference",
        by="interval",
        comparison=">=",
        bound=-0.05,
        min_n=16,
        on_undecided="warn",
        against_parent=True,
    ),
    Gate(
        name="general questions not worse",
        part="target",
        figure="task_difference",
        by="interval",
        comparison=">=",
        bound=-0.05,
        min_n=16,
        on_undecided="warn",
        against_parent=True,
    ),
    Gate(
        name="mismatch k3 small",
        part="target",
        figure="mismatch_k3_max",
        comparison="<=",
        bound=1e-2,
        against_parent=True,
    ),
    Gate(name="drafter accepts", part="drafter", figure="acceptance_length", comparison=">=", bound=1.3),
    Gate(name="greedy output identical", part="drafter", figure="output_identity", comparison=">=", bound=0.99),
    Gate(name="speculation pays", part="drafter", figure="speculation_speedup", comparison=">", bound=1.0),
    Gate(name="quant KL small", part="quant", figure="quant_kl", comparison="<=", bound=0.1),
    Gate(
        name="quant task accuracy not worse",
        part="quant",
        figure="quant_task_difference",
        by="interval",
        comparison=">=",
        bound=-0.05,
        min_n=16,
        on_undecided="warn",
    ),
]


class ReleaseConfig(Section):
    target: str = "latest"
    """Target version that is released: a number, `latest`, or an alias."""
    drafter: str = "latest"
    """Its drafter: a number, `latest` for the newest made for that version (none where there is none), or `none`."""
    quant: str = "latest"
    """Its quantized copy: a number, `latest`, or `none`."""
    gates: list[Gate] = DEFAULT_GATES
    """Rules the evidence must satisfy."""
    approval: Literal["none", "person"] = "none"
    """`person`: what the gates let pass waits until somebody has approved it, by `lockstep approve` or in Prefect."""
    approval_timeout_s: float = Field(86400.0, gt=0)
    """How long it waits, seconds; then the run ends without a release, and asks again when it is continued."""
    host: str = "127.0.0.1"
    """Address the released engine listens on."""
    port: int = Field(0, ge=0, le=65535)
    """Its port; 0 takes a free one."""
    questions: list[str] = Field(
        ["What is the capital of France?", "Write a Python function that adds two numbers.", "What is 7 times 8?"],
        min_length=1,
    )
    """Asked over HTTP before the alias moves."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest answer to one of them, tokens."""
    num_speculative_tokens: int = Field(3, ge=1)
    """Proposed tokens per target pass when the released drafter serves."""

    @model_validator(mode="after")
    def _check(self):
        names = [gate.name for gate in self.gates]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(f"two gates are called {double[0]!r}: verdicts are told apart by name, rename one")
        return self
