"""The evidence about a quant, for people."""

from typing import TYPE_CHECKING

from tasks.evaluate import page

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
    ("quant_reward_base", "reward of the base on held-out problems", "{:.3f}"),
    ("quant_reward", "reward of the quant on held-out problems", "{:.3f}"),
    ("quant_reward_difference", "reward difference, paired", "{:+.3f}"),
    ("quant_size_ratio", "size against the base's", "{:.2f}"),
    ("quant_speedup", "speed against the base's", "{:.2f}x"),
    ("quant_acceptance_length", "acceptance length of the target's drafter on it", "{:.2f}"),
    ("quant_acceptance_length_retrained", "acceptance length once it has learned from the quant", "{:.2f}"),
    ("quant_speculation_speedup", "speed with the drafter against without", "{:.2f}x"),
    ("quant_output_identity", "greedy answers the drafter leaves as they are", "{:.1%}"),
    ("quant_output_identity_noise", "greedy answers a second run without it leaves as they are", "{:.1%}"),
    ("quant_output_identity_difference", "the drafter's less the second run's", "{:+.1%}"),
)


def markdown(title: str, evidence: "pd.DataFrame") -> str:
    """A page with the figures that matter, by domain."""
    return "\n".join([f"# {title}", "", *page.table(records(evidence))]) + "\n"


def records(evidence: "pd.DataFrame") -> list[dict[str, str]]:
    """The same as rows of a table in Prefect."""
    return page.rows(evidence, SENTENCES)


def terminal(title: str, evidence: "pd.DataFrame") -> str:
    """The same as plain lines, over all domains, or by domain what is not known over all."""
    found = records(evidence)
    whole = {row["figure"] for row in found if row["domain"] == "all"}
    shown = [row for row in found if row["domain"] == "all" or row["figure"] not in whole]
    names = [row["figure"] + (f", {row['domain']}" if row["domain"] not in ("", "all") else "") for row in shown]
    width = max(map(len, names), default=0)
    cells = [
        f"  {name:<{width}}  {row['value']:>9}  {row['95% interval']}" for name, row in zip(names, shown, strict=True)
    ]
    return "\n".join([title, *(line.rstrip() for line in cells)])


def total(*spans: dict[str, float]) -> dict[str, float]:
    """Seconds by kind over several steps."""
    return {kind: sum(s.get(kind, 0.0) for s in spans) for kind in dict.fromkeys(k for s in spans for k in s)}
