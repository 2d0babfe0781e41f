"""What the verdicts allow to be released."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from tasks.release.gates import Verdict


class Decision(BaseModel):
    """Which parts are released.

    target: false when the release is refused. reasons: for each part that is left out the figures that cost it.
    warnings: gates that a person waived, and those that could not decide and let it pass.
    """

    model_config = ConfigDict(frozen=True)

    target: bool
    drafter: bool
    quant: bool
    reasons: list[str]
    warnings: list[str]

    @property
    def refusal(self) -> str:
        """Why the release is refused, in one line."""
        return "; ".join(self.reasons)

    def rejected(self, reason: str) -> "Decision":
        """The same, refused by a person."""
        nothing = dict(target=False, drafter=False, quant=False)
        return self.model_copy(update={**nothing, "reasons": [reason]})


def decide(verdicts: Sequence[Verdict], *, drafter: bool, quant: bool) -> Decision:
    """A failed target, safety or live gate refuses the release, a failed drafter or quant gate leaves that part out. A
    failed gate of the pair costs something only where both would be released: then the quant is, without the drafter.

    drafter, quant: whether there is one to release.
    """
    against = {part: [v.reason for v in verdicts if v.counts and v.part == part] for part in _PARTS}
    refused = against["target"] + against["safety"] + against["live"]
    if refused:
        return Decision(target=False, drafter=False, quant=False, reasons=refused, warnings=_warnings(verdicts))
    reasons = [
        f"released without the {part}: {reason}"
        for part, there in (("drafter", drafter), ("quant", quant))
        if there
        for reason in against[part]
    ]
    kept = {"drafter": drafter and not against["drafter"], "quant": quant and not against["quant"]}
    if all(kept.values()) and against["pair"]:
        kept["drafter"] = False
        reasons += [f"released without the drafter on the quant: {reason}" for reason in against["pair"]]
    return Decision(target=True, **kept, reasons=reasons, warnings=_warnings(verdicts))


_PARTS = ("target", "drafter", "quant", "pair", "safety", "live")


def _warnings(verdicts: Sequence[Verdict]) -> list[str]:
    waived = [f"{v.reason}; waived by {v.waived}" for v in verdicts if v.waived]
    return waived + [v.reason for v in verdicts if v.verdict == "undecided" and not v.counts and not v.waived]
