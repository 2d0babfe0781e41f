"""Gates: rules over evidence. Each verdict keeps the figure that it was reached by."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from infra.config.gates import Gate, Part
from infra.config.release import Waiver
from tasks.evaluate.evidence import LOAD

COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
OUT_OF_REACH = 1000.0  # an interval this many times as wide as it may be: nobody asks a million times the questions


class Verdict(BaseModel):
    """What one gate says of one row of evidence; value, low and high are null where they are not known.

    side: which of them was compared with the bound. needed_n: sample that would decide, where that can be estimated.
    counts: whether it costs its part (a failure, or an undecided verdict whose gate refuses).
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")

    name: str
    part: Part
    figure: str
    domain: str = ""
    subject: str = ""
    concurrency: int = 0
    side: Literal["value", "low", "high"] = "value"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    comparison: str
    bound: float
    n: int = 0
    unit: str = ""
    verdict: Literal["pass", "fail", "undecided"]
    counts: bool
    needed_n: int | None = None
    reason: str = Field("", description="one line, empty when it passed")
    waived: str = Field("", description="who lets it pass, and why; it does not count then")


def judge(
    evidence: pd.DataFrame,
    gates: Sequence[Gate],
    subjects: Mapping[Part, str],
    *,
    has_parent: bool = True,
    waivers: Sequence[Waiver] = (),
) -> list[Verdict]:
    """A verdict of every gate over each row of its figure, in the order of `gates`.

    evidence: a table of `tasks.evaluate.evidence`; of several rows of one figure, domain, subject and concurrency the
        last one counts.
    subjects: evidence name of each part that is to be released (`{"target": "target:smol/2", "safety": ...}`); gates of
        other parts are left out.
    has_parent: whether the target was trained from another version; if not, gates `against_parent` are left out.
    waivers: their gates' verdicts stay what they are, but do not count.
    """
    waived = {w.gate: f"{w.by}: {w.reason}" for w in waivers}
    verdicts = []
    for gate in gates:
        if gate.part not in subjects or (gate.against_parent and not has_parent):
            continue
        rows = _rows(evidence, gate, subjects[gate.part])
        verdicts += [_verdict(gate, row) for row in rows]
        if not rows and gate.on_absent == "fail":
            elsewhere = sorted(set(_measured(evidence, gate, subjects[gate.part])["concurrency"]))
            verdicts.append(_absent(gate, subjects[gate.part], elsewhere))
    return [
        v.model_copy(update={"counts": False, "waived": waived[v.name]}) if v.counts and v.name in waived else v
        for v in verdicts
    ]


def _rows(evidence: pd.DataFrame, gate: Gate, subject: str) -> list[dict]:
    rows = _measured(evidence, gate, subject)
    if gate.domain != "*":
        rows = rows[rows["domain"] == gate.domain]
    if isinstance(gate.concurrency, int):
        rows = rows[rows["concurrency"] == gate.concurrency]
    return rows.drop_duplicates(["figure", "domain", "concurrency"], keep="last").to_dict("records")


def _measured(evidence: pd.DataFrame, gate: Gate, subject: str) -> pd.DataFrame:
    """Rows of the gate's figure, under load too where the gate names a concurrency."""
    names = [gate.figure, f"{LOAD}{gate.figure}"] if isinstance(gate.concurrency, int) else [gate.figure]
    return evidence[evidence["figure"].isin(names) & (evidence["subject"] == subject)]


def _verdict(gate: Gate, row: dict) -> Verdict:
    outcome, side = _outcome(gate, row)
    needed = _needed_n(gate, row) if outcome == "undecided" else None
    counts = outcome == "fail" or (outcome == "undecided" and gate.on_undecided == "refuse")
    return Verdict(
        name=gate.name,
        part=gate.part,
        figure=gate.figure,
        domain=row["domain"],
        subject=row["subject"],
        concurrency=row["concurrency"],
        side=side,
        value=_known(row["value"]),
        low=_known(row["low"]),
        high=_known(row["high"]),
        comparison=gate.comparison,
        bound=gate.bound,
        n=row["n"],
        unit=row["unit"],
        verdict=outcome,
        counts=counts,
        needed_n=needed,
        reason="" if outcome == "pass" else _reason(gate, row, outcome, needed),
    )


def _outcome(gate: Gate, row: dict) -> tuple[Literal["pass", "fail", "undecided"], Literal["value", "low", "high"]]:
    keeps, bound = COMPARE[gate.comparison], gate.bound
    if gate.by == "value":
        if row["n"] < gate.min_n or math.isnan(row["value"]):
            return "undecided", "value"
        return ("pass" if keeps(row["value"], bound) else "fail"), "value"
    worst, best = ("low", "high") if gate.comparison in (">=", ">") else ("high", "low")
    if row["n"] < gate.min_n or math.isnan(row[worst]) or math.isnan(row[best]):
        return "undecided", worst
    if keeps(row[worst], bound):
        return "pass", worst
    return ("undecided", worst) if keeps(row[best], bound) else ("fail", best)


def _needed_n(gate: Gate, row: dict) -> int | None:
    """Sample at which the interval would leave the bound if the value stayed; its half-width shrinks as 1/sqrt(n)."""
    if row["n"] < gate.min_n:
        return gate.min_n
    distance = abs(row["value"] - gate.bound)
    half = abs(row["value"] - (row["low"] if row["value"] > gate.bound else row["high"]))
    if math.isnan(half) or half >= distance * OUT_OF_REACH:
        return None
    return max(row["n"] + 1, math.ceil(row["n"] * (half / distance) ** 2))


def _reason(gate: Gate, row: dict, outcome: str, needed: int | None) -> str:
    what = f"{gate.figure}{' on ' + row['domain'] if row['domain'] else ''}{_in_flight(gate)}"
    figure = f"{row['value']:.4g}"
    if not (math.isnan(row["low"]) or math.isnan(row["high"])):
        figure += f" [{row['low']:.4g}, {row['high']:.4g}]"
    where = f"{what} is {figure} (n={row['n']}, {row['engine']})"
    if outcome == "fail":
        return f"{gate.name}: {where}, not {gate.comparison} {gate.bound:g}{_hint(row)}"
    if row["n"] < gate.min_n:
        return f"{gate.name}: {where}, too small a sample to decide: it takes {gate.min_n}"
    enough = f"about {needed} would decide" if needed else "how many would decide cannot be estimated"
    return f"{gate.name}: {where}, which leaves {gate.comparison} {gate.bound:g} undecided; {enough}"


def _hint(row: dict) -> str:
    if row["figure"].endswith("speculation_speedup"):
        return "; speculating is slower than plain decoding there"
    if row["figure"] == "quant_drafter_tried":
        name, _, number = row["subject"].partition(":")[2].rpartition("/")
        return f"; `lockstep quantize --set quantize.adopted={name}-quant/{number}` tries the target's newest drafter"
    return ""


def _in_flight(gate: Gate) -> str:
    return f" with {gate.concurrency} in flight" if isinstance(gate.concurrency, int) else ""


def _absent(gate: Gate, subject: str, elsewhere: Sequence[int]) -> Verdict:
    """elsewhere: requests in flight at which the figure was measured all the same."""
    domain = "" if gate.domain == "*" else gate.domain
    what = f"{gate.figure}{' on ' + domain if domain else ''}{_in_flight(gate)}"
    but = f", but with {', '.join(map(str, elsewhere))}" if elsewhere and _in_flight(gate) else ""
    return Verdict(
        name=gate.name,
        part=gate.part,
        figure=gate.figure,
        domain=domain,
        subject=subject,
        concurrency=gate.concurrency if isinstance(gate.concurrency, int) else 0,
        comparison=gate.comparison,
        bound=gate.bound,
        verdict="fail",
        counts=True,
        reason=f"{gate.name}: {what} was never measured for {subject}{but}",
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
