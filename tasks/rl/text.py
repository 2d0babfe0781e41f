"""What RL training did, for people."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tasks.evaluate.page import table

if TYPE_CHECKING:
    import pandas as pd

# Figure before, after, difference; what it says.
COMPARISONS = (
    ("reward_before", "reward_after", "reward_difference", "held-out reward"),
    ("task_accuracy_before", "task_accuracy_after", "task_difference", "general questions"),
)
SCORES = ("score", "domain", "before", "after", "difference (95% interval)", "n")
# Column of the step table, its heading, how its values read.
STEP_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward_mean", "reward", "{:.3f}"),
    ("solved", "solved", "{:.0%}"),
    ("length_mean", "length", "{:.1f}"),
    ("loss", "loss", "{:.3g}"),
    ("grad_norm", "grad norm", "{:.3g}"),
    ("k3", "k3", "{:.2g}"),
    ("ess", "ESS", "{:.4f}"),
    ("tokens_per_second", "tokens/s", "{:.0f}"),
    ("prefix_hit_rate", "cached", "{:.0%}"),
)


def markdown(title: str, evidence: "pd.DataFrame") -> str:
    """A page with the scores before and after, by environment and benchmark."""
    value = {(r.figure, r.domain): r for r in evidence.itertuples()}
    compared = []
    for before, after, difference, name in COMPARISONS:
        for r in evidence[evidence["figure"] == difference].itertuples():
            pair = [f"{value[figure, r.domain].value:.3f}" for figure in (before, after)]
            interval = f"{r.value:+.3f} ({r.low:+.3f} to {r.high:+.3f})"
            cells = (name, r.domain, *pair, interval, f"{r.n:,}")
            compared.append(dict(zip(SCORES, cells, strict=True)))
    lines = [f"# {title}", "", *table(compared)]
    if ("mismatch_k3_max", "") in value:
        lines += ["", f"Worst mismatch k3 of a step: {value['mismatch_k3_max', ''].value:.2g} nats per token."]
    return "\n".join(lines) + "\n"


def step_records(steps: "pd.DataFrame") -> list[dict[str, str]]:
    """The steps as rows of a table in Prefect; what was not measured in a step is empty there."""
    shown = [column for column in STEP_COLUMNS if column[0] in steps]
    return [
        {heading: "" if math.isnan(row[name]) else form.format(row[name]) for name, heading, form in shown}
        for row in steps.to_dict("records")
    ]


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
