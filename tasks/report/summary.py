"""What one loop came to: the object that `lockstep report --json` prints and the report is drawn from."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, computed_field, model_validator

from infra.config.gates import Part

SPAN_KINDS = ("engine_start", "engine", "trainer", "sync", "quantize")


def _finite(value):
    """JSON has no NaN: an unknown number is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _read_back(cls, data):
        """Printed objects hold computed fields too; they are computed anew."""
        return {k: v for k, v in data.items() if k not in cls.model_computed_fields} if isinstance(data, dict) else data


class Phase(Record):
    seconds: float
    """Wall-clock seconds of this run."""
    cached: bool = False
    """True when this run took over the finished phase of an interrupted one."""
    spans: dict[str, float] = {}
    """Seconds by kind of work (`infra/services/spans.py`), measured when the work was done."""

    @computed_field
    @property
    def overhead(self) -> float:
        """Seconds that no span covers: the pipeline's own work."""
        return max(0.0, self.seconds - sum(self.spans.values()))


class Versions(Record):
    name: str
    """Registered model of the target."""
    target: int
    parent: int | None = None
    """Target version that training started from."""
    drafter: int | None = None
    quant: int | None = None
    release: int | None = None
    aliases: list[str] = []
    """Aliases that point to the release."""
    digests: dict[str, str] = {}
    """Artifact digest by kind: target, parent, drafter, quant, release."""


class Estimate(Record):
    value: Number
    low: Number = None
    """Lower end of the 95% interval, null where none is known."""
    high: Number = None
    """Upper end of the 95% interval, null where none is known."""
    n: int
    """Sample size, in the figure's own unit."""


class Acceptance(Record):
    length: Number
    """Mean tokens per target pass, bonus token included."""
    low: Number = None
    """Lower end of its 95% interval."""
    high: Number = None
    """Upper end of its 95% interval."""
    by_position: list[float] = []
    """Accepted at position i / drafts, first position first."""
    n: int
    """Drafts."""


class AcceptanceChange(Record):
    before: dict[str, Acceptance] = {}
    """By domain: the drafter that training started from, with the new target."""
    after: dict[str, Acceptance] = {}
    """By domain: the trained drafter with the new target."""
    on_quant: dict[str, Acceptance] = {}
    """By domain: the trained drafter with the quantized target."""


class MismatchStep(Record):
    step: int
    k1: Number = None
    k3: Number
    """Nats per token."""
    max_ratio: Number
    """Largest probability ratio of one token."""
    ess: Number
    """Effective share of the samples, in (0, 1]."""
    chi2: Number = None
    mean_abs: Number = None
    """Mean |D|, nats."""
    share_clipped: Number = None
    """Tokens whose ratio the correction truncates."""
    share_dropped: Number = None
    """Tokens that the correction gives no weight."""


class Mismatch(Record):
    steps: list[MismatchStep] = []
    warn: dict[str, float] = {}
    """By figure: the bound past which a step is marked; the lowest ess, the highest of the others."""
    stop: dict[str, float] = {}
    """By figure: the bound past which the run stops."""
    ratio_bound: Number = None
    """Ratio above which the correction truncates or masks a token."""

    @computed_field
    @property
    def worst(self) -> dict[str, float | None]:
        """Largest k3 and ratio, smallest ESS."""
        return {
            "k3": max((s.k3 for s in self.steps if s.k3 is not None), default=None),
            "max_ratio": max((s.max_ratio for s in self.steps if s.max_ratio is not None), default=None),
            "ess": min((s.ess for s in self.steps if s.ess is not None), default=None),
        }


class Comparison(Record):
    """A score of the parent and of the new target (or of base and quant) on the same questions."""

    before: Estimate | None = None
    after: Estimate | None = None
    difference: Estimate | None = None
    """Paired, after - before."""


class QuantFidelity(Record):
    scheme: str
    kl: dict[str, Estimate] = {}
    """KL(base || quant) by domain, nats per token."""
    flips: dict[str, Estimate] = {}
    """Share of positions (or answers) that changed, by domain."""
    perplexity_ratio: dict[str, Estimate] = {}
    """Perplexity of the quant / of the base, by domain."""
    tasks: dict[str, Comparison] = {}
    """Accuracy by task: before is the base, after the quant."""
    rewards: dict[str, Comparison] = {}
    """Held-out reward by RL environment: before is the base, after the quant."""


class GateVerdict(Record):
    """One verdict of `tasks/release/gates.py`, which explains its fields."""

    name: str
    part: Part
    figure: str
    domain: str = ""
    subject: str = ""
    concurrency: int = 0
    side: Literal["value", "low", "high"] = "value"
    value: Number = None
    low: Number = None
    high: Number = None
    comparison: str
    bound: float
    n: int = 0
    unit: str = ""
    verdict: Literal["pass", "fail", "undecided"]
    counts: bool = False
    needed_n: int | None = None
    reason: str = ""
    waived: str = ""


class Released(Record):
    target: bool = False
    drafter: bool = False
    quant: bool = False
    reasons: list[str] = []
    """Why a part was left out, or the release refused, with the figure that decided."""
    warnings: list[str] = []
    """Gates that could not decide and let it pass."""


class Answer(Record):
    question: str
    answer: str


class LoopSummary(Record):
    run: str
    """Run key."""
    flow: str
    verdict: Literal["released", "refused", "finished", "failed"]
    """released or refused by the gates; finished where the flow releases nothing; failed when it broke."""
    error: str = ""
    """Root cause, when failed."""
    started: str
    """UTC, ISO 8601."""
    wall_s: float
    """Seconds from start to end of this run."""
    phases: dict[str, Phase] = {}
    versions: Versions
    engine: str
    """Engine pin."""
    hardware: str
    rewards: dict[str, Comparison] = {}
    """Held-out reward by environment: before and after training."""
    tasks: dict[str, Comparison] = {}
    """General questions by task: parent and new target."""
    mismatch: Mismatch | None = None
    acceptance: AcceptanceChange = AcceptanceChange()
    speculation: dict[str, dict[str, Estimate]] = {}
    """By domain: `speedup`, `tokens_per_second`, `tokens_per_second_plain`, `output_identity`."""
    quant: QuantFidelity | None = None
    gates: list[GateVerdict] = []
    released: Released = Released()
    served: list[Answer] = []
    """What the released engine answered over HTTP."""
    addresses: dict[str, str] = {}
    """Where to look further, by name: prefect, mlflow, serving."""
    report: str = ""
    """Path of the report's page."""

    @computed_field
    @property
    def overhead(self) -> dict[str, float]:
        """Seconds of this run that were not engine, trainer, sync or quantize work, and their share of `wall_s`."""
        covered = sum(sum(p.spans.values()) for p in self.phases.values() if not p.cached)
        seconds = max(0.0, self.wall_s - covered)
        return {"seconds": seconds, "share": seconds / self.wall_s if self.wall_s else 0.0}
