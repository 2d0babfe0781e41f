"""What RL training did, for people."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Figure before, after, difference; what it says.
COMPARISONS = (
    ("reward_before", "reward_after", "reward_difference", "held-out reward"),
    ("task_accuracy_before", "task_accuracy_after", "task_difference", "general questions"),
)
STEP_COLUMNS = (
    "step",
    "reward_mean",
    "solved",
    "length_mean",
    "loss",
    "grad_norm",
    "k3",
    "ess",
    "tokens_per_second",
    "prefix_hit_rate",
)


def markdown(title: str, evidence: "pd.DataFrame") -> str:
    """A page with the scores before and after, by environment and benchmark."""
    value = {(r.figure, r.domain): r for r in evidence.itertuples()}
    lines = [
        f"# {title}",
        "",
        "| | domain | before | after | difference (95% interval) | n |",
        "|---|---|---|---|---|---|",
    ]
    for before, after, difference, name in COMPARISONS:
        for r in evidence[evidence["figure"] == difference].itertuples():
            pair = [f"{value[figure, r.domain].value:.3f}" for figure in (before, after)]
            interval = f"{r.value:+.3f} ({r.low:+.3f} to {r.high:+.3f})"
            lines.append(f"| {name} | {r.domain} | {pair[0]} | {pair[1]} | {interval} | {r.n} |")
    if ("mismatch_k3_max", "") in value:
        lines += ["", f"Worst mismatch k3 of a step: {value['mismatch_k3_max', ''].value:.2g} nats per token."]
    return "\n".join(lines) + "\n"


def step_records(steps: "pd.DataFrame") -> list[dict]:
    """Rows for a table in Prefect, which takes no NaN."""
    rows = steps[[column for column in STEP_COLUMNS if column in steps]].to_dict("records")
    return [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]


def step_line(row: Mapping[str, float]) -> str:
    """A step in one line: reward, length, speed, who waited, how old the samples were."""
    line = (
        f"reward {row['reward_mean']:.3f}, {row['length_mean']:.0f} tokens an answer, "
        f"{row['tokens_per_second']:.0f} tokens/s, {row['step_s']:.1f} s, idle: trainer "
        f"{row['trainer_idle_share']:.0%}, engines {row['engine_idle_share']:.0%}; "
        f"staleness {row['staleness_mean']:.1f}"
    )
    held_out = [f"{name[12:]} {value:.3f}" for name, value in row.items() if name.startswith("eval_reward_")]
    return f"{line}; held out at version {row['eval_version']:.0f}: {', '.join(held_out)}" if held_out else line
