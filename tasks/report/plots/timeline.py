"""What each worker of the RL phase did when."""

import pandas as pd

from tasks.report.plots.figure import Figure
from tasks.report.plots.svg import Bands, Linear, Plot, number

KINDS = {
    "rollout": ("c1", "rollouts"),
    "train": ("c3", "training"),
    "sync": ("c4", "weight sync"),
    "checkpoint": ("c5", "checkpoint"),
}
SHOWN_S = 120.0
"""Longest stretch that is drawn: in the middle of the run, where it goes its usual way."""


def workers(rows: pd.DataFrame) -> Figure:
    """A band for each worker, its idle time left empty.

    rows: `worker`, `kind`, `start_s`, `end_s`; spans of one worker may overlap, the later kind of KINDS is on top.
    """
    begin, end = float(rows["start_s"].min()), float(rows["end_s"].max())
    if end - begin > SHOWN_S:
        middle = (begin + end) / 2
        begin, end = middle - SHOWN_S / 2, middle + SHOWN_S / 2
    shown = rows[(rows["end_s"] > begin) & (rows["start_s"] < end)]
    names = sorted(shown["worker"].unique(), key=lambda name: (name != "trainer", len(name), name))
    plot = Plot(
        "Timeline of the workers",
        Linear(0, end - begin, exact=True),
        Bands(names),
        x_label="seconds",
        y_label="",
        height=38 * len(names) + 64,
        left=16 + int(6.4 * max(map(len, names))),
    )
    for kind, (cls, words) in KINDS.items():
        for row in shown[shown["kind"] == kind].itertuples():
            start, stop = max(row.start_s, begin) - begin, min(row.end_s, end) - begin
            tip = f"{row.worker}: {words}, {number(row.end_s - row.start_s)} s"
            plot.bar((start, (row.worker, -0.32)), (stop, (row.worker, 0.32)), cls, tip)
    busy = {name: _covered(shown[shown["worker"] == name], begin, end) / (end - begin) for name in names}
    idle = ", ".join(f"{name} {1 - share:.0%}" for name, share in busy.items())
    used = set(shown["kind"])
    return Figure(
        "timeline",
        "What each worker did",
        plot.svg(),
        f"Idle in what is shown: {idle}.",
        legend=[KINDS[kind] for kind in KINDS if kind in used],
    )


def _covered(rows: pd.DataFrame, begin: float, end: float) -> float:
    """Seconds of [begin, end] in which at least one of the spans lies."""
    covered, reached = 0.0, begin
    for start, stop in sorted(zip(rows["start_s"], rows["end_s"], strict=True)):
        covered += max(0.0, min(stop, end) - max(start, reached))
        reached = max(reached, min(stop, end))
    return covered
