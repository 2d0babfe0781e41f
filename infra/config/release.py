"""The `release` section: what is released, who may let it pass, and how it is served."""

import difflib
from typing import Annotated, Literal

from pydantic import Field, model_validator

from infra.config.base import Section
from infra.config.fleet import FleetConfig
from infra.config.gates import DEFAULT_GATES, Gate, Part
from infra.config.recording import RecordingConfig


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
