"""Gates: rules that the evidence about a release must satisfy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infra.config.base import Section

Part = Literal["target", "drafter", "quant", "pair", "safety", "live"]


class Gate(Section):
    """A rule over evidence: `figure` (and `domain`) compared with `bound`."""

    name: str
    """Shown in verdicts."""
    part: Part
    """What a failure costs: target and safety refuse the release, drafter and quant release without that part. `pair`
    is about the drafter on the quant, where both would be released: a failure releases the quant without the drafter.
    `live` is judged at each step of a canary in a fleet: a failure takes its requests back and refuses the release."""
    figure: str
    """Figure of the evidence table."""
    domain: str = "*"
    """Domain of the figure; `*` judges every domain that was measured."""
    concurrency: Annotated[int, Field(ge=1)] | Literal["any", "served"] = "any"
    """Requests in flight at which the figure, or `load_` and the figure, was measured; `served`: as many as
    `release.concurrency` says; `any` judges the figure alone, however many there were."""
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
    """What an undecided verdict does: count as a failure, or be reported only."""
    on_absent: Literal["fail", "skip"] = "fail"
    """What becomes of a figure that was never measured: a failure, or no verdict."""
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
    Gate(name="adopted target measured", part="target", figure="target_proven", comparison="==", bound=1),
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
    Gate(name="drafter fits its target", part="drafter", figure="drafter_misfit", comparison="==", bound=0),
    Gate(name="drafter accepts", part="drafter", figure="acceptance_length", comparison=">=", bound=1.3),
    Gate(
        name="accepts no less than the champion's",
        part="drafter",
        figure="acceptance_length_difference",
        by="interval",
        comparison=">=",
        bound=-0.1,
        min_n=100,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(
        name="accepts no less at any position",
        part="drafter",
        figure="acceptance_rate_difference",
        by="interval",
        comparison=">=",
        bound=-0.1,
        min_n=100,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(
        name="greedy output identical",
        part="drafter",
        figure="output_identity_difference",
        domain="all",
        by="interval",
        comparison=">=",
        bound=-0.12,  # all of 15 prompts alike can show that
    ),
    Gate(
        name="speculation pays",
        part="drafter",
        figure="speculation_speedup",
        concurrency="served",
        comparison=">",
        bound=1.0,
    ),
    Gate(
        name="tokens come as steadily as the champion's",
        part="drafter",
        figure="itl_p99_ratio",
        domain="all",
        comparison="<=",
        bound=2.0,
        min_n=1000,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(name="quant fits its target", part="quant", figure="quant_misfit", comparison="==", bound=0),
    Gate(name="quant KL small", part="quant", figure="quant_kl", comparison="<=", bound=0.1),
    Gate(
        name="held-out reward not worse on the quant",
        part="quant",
        figure="quant_reward_difference",
        by="interval",
        comparison=">=",
        bound=-0.05,
        min_n=16,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(
        name="quant recovers the base's accuracy",
        part="quant",
        figure="quant_recovery",
        domain="all",
        by="interval",
        comparison=">=",
        bound=0.95,
        min_n=16,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(name="drafter measured on the quant", part="pair", figure="quant_drafter_tried", comparison="==", bound=1),
    Gate(
        name="speculation pays on the quant",
        part="pair",
        figure="quant_speculation_speedup",
        concurrency="served",
        comparison=">",
        bound=1.0,
    ),
    Gate(
        name="drafter accepts on the quant",
        part="pair",
        figure="quant_acceptance_length_difference",
        by="interval",
        comparison=">=",
        bound=-0.2,
        min_n=100,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(
        name="greedy output identical on the quant",
        part="pair",
        figure="quant_output_identity_difference",
        domain="all",
        by="interval",
        comparison=">=",
        bound=-0.12,
        on_absent="skip",
    ),
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
    Gate(name="requests answered", part="live", figure="live_error_share", comparison="<=", bound=0.01),
    Gate(
        name="golden answers kept",
        part="live",
        figure="live_golden_difference",
        comparison=">=",
        bound=0,
        on_absent="skip",
    ),
    Gate(
        name="first token not late",
        part="live",
        figure="live_ttft_p99_ratio",
        comparison="<=",
        bound=2.0,
        min_n=200,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(
        name="tokens not slow",
        part="live",
        figure="live_itl_p99_ratio",
        comparison="<=",
        bound=2.0,
        min_n=2000,
        on_undecided="warn",
        on_absent="skip",
    ),
    Gate(
        name="accepts as the champion does",
        part="live",
        figure="live_acceptance_difference",
        comparison=">=",
        bound=-0.3,
        min_n=500,
        on_undecided="warn",
        on_absent="skip",
    ),
]
