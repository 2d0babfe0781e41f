"""The evidence about a quant, for people."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Figure, what it says, how its value reads.
SENTENCES = (
    ("quant_kl", "KL(base || quant), lower bound, nats per token", "{:.2g}"),
    ("quant_flips", "positions whose likeliest token changed", "{:.1%}"),
    ("quant_perplexity_ratio", "perplexity against the base's", "{:.4f}"),
    ("quant_max_error", "largest change of a token's log-prob, nats", "{:.2g}"),
    ("quant_task_accuracy_base", "questions the base answers right", "{:.1%}"),
    ("quant_task_accuracy", "questions the quant answers right", "{:.1%}"),
    ("quant_task_difference", "difference, paired", "{:+.1%}"),
    ("quant_size_ratio", "size against the base's", "{:.2f}"),
    ("quant_speedup", "speed against the base's", "{:.2f}x"),
    ("quant_acceptance_length", "acceptance length of the target's drafter on it", "{:.2f}"),
    ("quant_acceptance_length_retrained", "acceptance length once it has learned from the quant", "{:.2f}"),
    ("quant_speculation_speedup", "speed with the drafter against without", "{:.2f}x"),
    ("quant_output_identity", "greedy answers the drafter leaves as they are", "{:.1%}"),
)


def markdown(title: str, evidence: "pd.DataFrame") -> str:
    """A page with the figures that matter, by domain."""
    lines = [f"# {title}", "", "| figure | domain | value | 95% interval | n |", "|---|---|---|---|---|"]
    for figure, sentence, form in SENTENCES:
        for measured in evidence[evidence["figure"] == figure].itertuples():
            interval = (
                "" if math.isnan(measured.low) else f"{form.format(measured.low)} to {form.format(measured.high)}"
            )
            value = form.format(measured.value)
            lines.append(f"| {sentence} | {measured.domain} | {value} | {interval} | {measured.n} {measured.unit} |")
    return "\n".join(lines) + "\n"


def records(evidence: "pd.DataFrame") -> list[dict]:
    """Rows for a table in Prefect, which takes no NaN."""
    columns = ["figure", "domain", "value", "low", "high", "n", "unit", "concurrency"]
    rows = evidence[columns].to_dict("records")
    return [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]


def total(*spans: dict[str, float]) -> dict[str, float]:
    """Seconds by kind over several steps."""
    return {kind: sum(s.get(kind, 0.0) for s in spans) for kind in dict.fromkeys(k for s in spans for k in s)}
