"""The evidence about a drafter, for people."""

from typing import TYPE_CHECKING

from tasks.evaluate import page

if TYPE_CHECKING:
    import pandas as pd

# Figure, what it says, how its value reads.
SENTENCES = (
    ("acceptance_length_before", "tokens per target pass, before training", "{:.2f}"),
    ("acceptance_length", "tokens per target pass, after", "{:.2f}"),
    ("acceptance_length_sampled", "the same at the temperature of serving", "{:.2f}"),
    ("acceptance_length_without_loops", "tokens per pass outside of repeated 8-grams", "{:.2f}"),
    ("tokens_per_second_plain", "tokens/s without speculation", "{:.1f}"),
    ("tokens_per_second", "tokens/s with the drafter", "{:.1f}"),
    ("speculation_speedup", "speed with the drafter against without", "{:.2f}x"),
    ("best_num_speculative_tokens", "best number of proposed tokens, by measured rates and costs", "{:.0f}"),
    ("speedup_at_best", "speed that it should give", "{:.2f}x"),
    ("output_identity", "greedy answers the drafter leaves as they are", "{:.1%}"),
    ("output_identity_noise", "greedy answers a second run without it leaves as they are", "{:.1%}"),
    ("output_identity_difference", "the drafter's less the second run's", "{:+.1%}"),
    ("draft_vocab_coverage", "generated tokens that the head can propose", "{:.1%}"),
)


# Figure under load, heading of its column, how its value reads.
COLUMNS = (
    ("load_acceptance_length", "tokens per pass", "{:.2f}"),
    ("load_tokens_per_second_plain", "tokens/s without", "{:.1f}"),
    ("load_tokens_per_second", "tokens/s with", "{:.1f}"),
    ("load_speculation_speedup", "speedup", "{:.2f}x"),
    ("load_ttft_p50", "first token p50, ms", "{:.0f}"),
    ("load_ttft_p99", "p99, ms", "{:.0f}"),
    ("load_itl_p50", "between tokens p50, ms", "{:.1f}"),
    ("load_itl_p99", "p99, ms", "{:.1f}"),
    ("load_best_num_speculative_tokens", "best number to propose", "{:.0f}"),
)


def markdown(title: str, evidence: "pd.DataFrame") -> str:
    """A page with the figures that matter, by domain, and the acceptance rates by position."""
    return "\n".join([f"# {title}", "", *page.table(records(evidence)), *_under_load(evidence)]) + "\n"


def records(evidence: "pd.DataFrame") -> list[dict[str, str]]:
    """The figures as rows of a table in Prefect."""
    positions = sorted(f for f in set(evidence["figure"]) if f.startswith("acceptance_rate_position_"))
    rates = [(f, f.replace("_", " "), "{:.1%}") for f in positions if not f.endswith("_before")]
    return page.rows(evidence, [*SENTENCES, *rates])


def _under_load(evidence: "pd.DataFrame") -> list[str]:
    loaded = evidence[evidence["figure"] == "load_tokens_per_second"]
    if loaded.empty:
        return []
    lines = ["", "## Under load", "", f"| in flight | {' | '.join(heading for _, heading, _ in COLUMNS)} |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for concurrency in loaded["concurrency"]:
        at = evidence[evidence["concurrency"] == concurrency].drop_duplicates("figure", keep="last")
        values = dict(zip(at["figure"], at["value"], strict=True))
        cells = [form.format(values[figure]) if figure in values else "" for figure, _, form in COLUMNS]
        lines.append(f"| {concurrency} | {' | '.join(cells)} |")
    return lines


def total(*spans: dict[str, float]) -> dict[str, float]:
    """Seconds by kind over several steps."""
    return {kind: sum(s.get(kind, 0.0) for s in spans) for kind in dict.fromkeys(k for s in spans for k in s)}
