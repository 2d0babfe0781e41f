"""Pictures of the reinforcement learning phase."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from tasks.report.plots.figure import Figure, interval
from tasks.report.plots.svg import SMALL, Linear, Log, Plot, Steps, number
from tasks.report.summary import Comparison, Mismatch

ENVIRONMENT_CLASSES = ("c2", "c3", "c4", "c5")


def reward(steps: pd.DataFrame, held_out: dict[str, Comparison]) -> Figure:
    """Mean reward of each step's rollouts, with the held-out reward of each environment before and after."""
    points = list(zip(steps["step"].astype(int), steps["reward_mean"].astype(float), strict=True))
    first, last = points[0][0], points[-1][0]
    sides = [e for c in held_out.values() for e in (c.before, c.after) if e is not None]
    top = max([v for _, v in points] + [e.high or e.value or 0 for e in sides])
    bottom = min([0.0] + [v for _, v in points] + [e.low or e.value or 0 for e in sides])
    plot = Plot(
        "Reward by step",
        Steps(first - 1, last + 1, {first - 1: "before", last + 1: "after"}),
        Linear(bottom, max(top, 0.1)),
        x_label="optimizer step",
        y_label="mean reward",
    )
    plot.series(points, "c1", "mean reward")
    for i, (name, comparison) in enumerate(held_out.items()):
        cls = ENVIRONMENT_CLASSES[i % len(ENVIRONMENT_CLASSES)]
        nudge = 0.12 * (i - (len(held_out) - 1) / 2)
        for x, side, estimate in (
            (first - 1 + nudge, "before", comparison.before),
            (last + 1 + nudge, "after", comparison.after),
        ):
            if estimate is None or estimate.value is None:
                continue
            if estimate.low is not None and estimate.high is not None:
                plot.span((x, estimate.low), (x, estimate.high), cls)
            plot.dot(x, estimate.value, cls, f"{name} held out, {side}: {interval(estimate)}, n={estimate.n}")
        if (column := f"eval_reward_{name}") in steps:
            for row in steps[steps[column].notna()][["step", column]].itertuples(index=False):
                plot.dot(int(row[0]), float(row[1]), cls, f"{name} held out, step {row[0]:.0f}: {number(row[1])}")
    legend = [("c1", "training rollouts")]
    legend += [(ENVIRONMENT_CLASSES[i % 4], f"held out: {name or 'all'}") for i, name in enumerate(held_out)]
    return Figure("reward", "Reward by step", plot.svg(), _changes(held_out), legend)


def _changes(held_out: dict[str, Comparison]) -> str:
    parts = [f"{name or 'all'} {interval(c.difference)}" for name, c in held_out.items() if c.difference]
    return f"Held-out change, paired, 95% interval: {'; '.join(parts)}." if parts else ""


def mismatch(m: Mismatch) -> list[Figure]:
    """k3, the largest ratio and ESS by step, each as its distance from perfect agreement."""
    worst = m.worst
    k3_bounds = [
        (m.warn_k3, f"marks the step: {number(m.warn_k3)}"),
        (m.stop_k3, f"stops the run: {number(m.stop_k3)}"),
    ]
    ratio_bounds = [(m.ratio_bound - 1, f"corrected above ratio {number(m.ratio_bound)}")] if m.ratio_bound else []
    return [
        _distance("mismatch-k3", "k3", "nats per token", [(s.step, s.k3) for s in m.steps], k3_bounds, worst["k3"]),
        _distance(
            "mismatch-ratio",
            "largest ratio − 1",
            "ratio − 1",
            [(s.step, s.max_ratio and s.max_ratio - 1) for s in m.steps],
            ratio_bounds,
            worst["max_ratio"] and worst["max_ratio"] - 1,
        ),
        _distance(
            "mismatch-ess",
            "1 − ESS",
            "share of the samples lost",
            [(s.step, s.ess and 1 - s.ess) for s in m.steps],
            [],
            worst["ess"] and 1 - worst["ess"],
        ),
    ]


def _distance(key: str, name: str, unit: str, points: list, bounds: list, worst: float | None) -> Figure:
    points = [(x, y) for x, y in points if y is not None]
    positive = [y for _, y in points if y > 0] + [b for b, _ in bounds]
    low, high = (min(positive), max(positive)) if positive else (1e-6, 1.0)
    steps = [x for x, _ in points] or [1]
    plot = Plot(
        f"Mismatch by step: {name}",
        Steps(min(steps), max(steps)),
        Log(low / 3, max(high, low * 10)),
        x_label="optimizer step",
        y_label=unit,
        width=SMALL,
    )
    for bound, label in bounds:
        plot.bound(bound, label)
    plot.series(points, "c1", name)
    return Figure(key, f"{name}: at worst {number(worst)}", plot.svg())


def lengths(rollouts: Sequence[dict[str, Any]]) -> Figure:
    """Tokens of the answers at the first and the last step."""
    by_step: dict[int, list[int]] = {}
    for r in rollouts:
        by_step.setdefault(int(r["step"]), []).append(int(r["num_tokens"]))
    first, last = min(by_step), max(by_step)
    longest = max(n for ns in by_step.values() for n in ns)
    width = max(1, -(-(longest + 1) // 24))
    bins = list(range(0, longest + 1, width))
    shown = {first: "c0", last: "c1"}
    shares = {
        step: [sum(b <= n < b + width for n in by_step[step]) / len(by_step[step]) for b in bins] for step in shown
    }
    plot = Plot(
        "Response lengths",
        Linear(0, bins[-1] + width, exact=True),
        Linear(0, max(max(s) for s in shares.values())),
        x_label="tokens of the answer",
        y_label="share of the rollouts",
    )
    for rank, (step, cls) in enumerate(shown.items()):
        part = width / len(shown)
        for b, share in zip(bins, shares[step], strict=True):
            if share:
                tip = f"step {step}: {b} to {b + width - 1} tokens: {share:.0%} of {len(by_step[step])} rollouts"
                start = b + rank * part + 0.06 * width
                plot.bar((start, 0), (start + part - 0.08 * width, share), cls, tip)
    means = {step: sum(ns) / len(ns) for step, ns in by_step.items()}
    cut = sum(r.get("finish_reason") == "length" for r in rollouts)
    caption = f"{len(rollouts)} rollouts" + (f", {cut} of them cut at the limit." if cut else ".")
    title = f"Answers: {number(means[first])} tokens on average"
    title += f" at step {first}, {number(means[last])} at step {last}" if first != last else ""
    return Figure("lengths", title, plot.svg(), caption, [(cls, f"step {step}") for step, cls in shown.items()])
