"""The `release` section: gates, and how a release is served."""

import difflib
from typing import Annotated, Literal

from pydantic import Field, model_validator

from infra.config.base import Section
from infra.config.fleet import FleetConfig
from infra.config.recording import RecordingConfig

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
    Gate(name="greedy output identical", part="drafter", figure="output_identity", comparison=">=", bound=0.99),
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
        bound=-0.1,
        min_n=16,
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


class Waiver(Section):
    """A person lets one gate pass, and answers for it."""

    gate: str
    """The gate's name."""
    by: str = Field(min_length=1)
    """Who decided this."""
    reason: str = Field(min_length=1)
    """Why; kept in the release."""


class Golden(Section):
    question: str
    """Asked greedily, of the new release and of the champion."""
    expect: str
    """The answer is right when it contains this, upper or lower case."""


class ReleaseConfig(Section):
    target: str = "latest"
    """Target version that is released: a number, `latest`, or an alias."""
    drafter: str = "latest"
    """Its drafter: a number, `latest` for the newest made for that version (none where there is none), `best` for the
    one, of whatever kind, with which it was measured to be fastest, or `none`."""
    quant: str = "latest"
    """Its quantized copy: a number, `latest`, or `none`."""
    gates: list[Gate] = DEFAULT_GATES
    """Rules the evidence must satisfy."""
    concurrency: int | None = Field(None, ge=1)
    """Requests in flight at which a replica is to serve, at which gates of concurrency `served` judge:
    `drafter.eval_concurrency` or one of `drafter.load_concurrency`. Without it they judge at whatever was measured."""
    approval: Literal["none", "person"] = "none"
    """`person`: what the gates let pass waits until somebody has approved it, by `lockstep approve` or in Prefect."""
    approval_timeout_s: float = Field(86400.0, gt=0)
    """How long it waits, seconds; then the run ends without a release, and asks again when it is continued."""
    waivers: list[Waiver] = []
    """Gates that a person lets pass: `lockstep release --waive GATE --by NAME --reason TEXT` adds one."""
    waivable: list[Part] = ["drafter", "quant", "pair"]
    """Parts whose gates may be waived at all."""
    fleet: FleetConfig = FleetConfig()
    """How `lockstep serve` serves, and how a new release takes over there."""
    golden: list[Golden] = Field(
        [
            Golden(question="What is the capital of France?", expect="Paris"),
            Golden(question="What is the opposite of hot?", expect="cold"),
            Golden(question="How many days are there in a week?", expect="seven"),
        ],
        min_length=1,
    )
    """What the new release must answer as well as the champion does."""
    questions: list[str] = Field(
        ["What is the capital of France?", "Write a Python function that adds two numbers.", "What is 7 times 8?"],
        min_length=1,
    )
    """Asked over HTTP before the alias moves."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest answer to one of them, tokens."""
    num_speculative_tokens: Annotated[int, Field(ge=1)] | Literal["best"] = 3
    """Proposed tokens per target pass when the released drafter serves; `best` for as many as were measured to be best
    at each number of requests in flight (`drafter.load_concurrency`), and none where speculation was slower."""
    recording: RecordingConfig = RecordingConfig()
    """Requests that the released engine keeps as traffic for drafters."""

    @property
    def judged(self) -> list[Gate]:
        """The gates, those of concurrency `served` at the number of requests in flight that is meant."""
        served = self.concurrency or "any"
        return [
            gate.model_copy(update={"concurrency": served}) if gate.concurrency == "served" else gate
            for gate in self.gates
        ]

    @model_validator(mode="after")
    def _check(self):
        names = [gate.name for gate in self.gates]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(f"two gates are called {double[0]!r}: verdicts are told apart by name, rename one")
        parts = {gate.name: gate.part for gate in self.gates}
        for waiver in self.waivers:
            if waiver.gate not in parts:
                near = difflib.get_close_matches(waiver.gate, parts, n=1) or sorted(parts)
                raise ValueError(f"waivers: no gate is called {waiver.gate!r}: did you mean {' or '.join(near)}?")
            if (part := parts[waiver.gate]) not in self.waivable:
                raise ValueError(
                    f"waivers: {waiver.gate!r} guards the {part}, whose gates are not to be waived; "
                    f"add {part!r} to release.waivable if they shall be"
                )
        return self
