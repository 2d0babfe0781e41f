"""The evidence about a drafter, for people."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Figure, what it says, how its value reads.
SENTENCES = (
    ("acceptance_length_before", "tokens per target pass, before training", "{:.2f}"),
    ("acceptance_length", "tokens per target pass, after", "{:.2f}"),
    ("tokens_per_second_plain", "tokens/s without speculation", "{:.1f}"),
    ("tokens_per_second", "tokens/s with the drafter", "{:.1f}"),
    ("speculation_speedup", "speed with the drafter against without", "{:.2f}x"),
    ("output_identity", "greedy answers the drafter leaves as they are", "{:.1%}"),
    ("draft_vocab_coverage", "generated tokens that the head can propose", "{:.1%}"),
)


def markdown(title: str, evidence: "pd.DataFrame") -> str:
    """A page with the figures that matter, by domain, and the acceptance rates by position."""
    lines = [f"# {title}", "", "| figure | domain | value | 95% interval | n |", "|---|---|---|---|---|"]
    positions = sorted(f for f in set(evidence["figure"]) if f.startswith("acceptance_rate_position_"))
    rates = [(f, f.replace("_", " "), "{:.1%}") for f in positions if not f.endswith("_before")]
    for figure, sentence, form in [*SENTENCES, *rates]:
        for measured in evidence[evidence["figure"] == figure].itertuples():
            ends = "" if math.isnan(measured.low) else f"{form.format(measured.low)} to {form.format(measured.high)}"
            value = form.format(measured.value)
            lines.append(f"| {sentence} | {measured.domain} | {value} | {ends} | {measured.n} {measured.unit} |")
    return "\n".join(lines) + "\n"


def records(evidence: "pd.DataFrame") -> list[dict]:
    """Acceptance by domain as rows of a table in Prefect, which takes no NaN."""
    shown = evidence[evidence["figure"].str.startswith(("acceptance", "tokens_per_second", "speculation", "output"))]
    rows = shown[["figure", "domain", "value", "low", "high", "n", "unit", "concurrency"]].to_dict("records")
    return [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]


def total(*spans: dict[str, float]) -> dict[str, float]:
    """Seconds by kind over several steps."""
    return {kind: sum(s.get(kind, 0.0) for s in spans) for kind in dict.fromkeys(k for s in spans for k in s)}
