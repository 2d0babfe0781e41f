"""Pictures of the reinforcement learning phase."""

from collections.abc import Callable, Sequence
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
    """Every figure of the mismatch by step, each as its distance from perfect agreement."""
    worst, ratio = m.worst, m.ratio_bound

    def curve(name: str, distance: Callable[[float], float] = abs) -> list[tuple[int, float]]:
        values = [(s.step, getattr(s, name)) for s in m.steps]
        return [(step, distance(value)) for step, value in values if value is not None]

    def bounds(name: str, distance: Callable[[float], float] = abs) -> list[tuple[float, str]]:
        marks = [(m.warn, "marks the step"), (m.stop, "stops the run")]
        return [(distance(b[name]), f"{what}: {number(b[name])}") for b, what in marks if name in b]

    def above_one(value: float) -> float:
        return value - 1

    def below_one(value: float) -> float:
        return 1 - value

    ratio_bounds = [(ratio - 1, f"corrected above ratio {number(ratio)}")] if ratio else []
    mean = max((y for _, y in curve("mean_abs")), default=None)
    chi2 = max((y for _, y in curve("chi2")), default=None)
    dropped = max((y for _, y in curve("share_dropped")), default=None)
    shares = {"truncated": curve("share_clipped"), "no weight": curve("share_dropped")}
    figures = [
        _distance(
            "mismatch-k3",
            f"k3: at worst {number(worst['k3'])}",
            "nats per token",
            {"k3": curve("k3"), "|k1|": curve("k1")},
            bounds("k3"),
        ),
        _distance(
            "mismatch-mean",
            f"mean |D|: at worst {number(mean)}",
            "nats",
            {"mean |D|": curve("mean_abs")},
            bounds("mean_abs"),
        ),
        _distance(
            "mismatch-ratio",
            f"largest ratio − 1: at worst {number(worst['max_ratio'] and worst['max_ratio'] - 1)}",
            "ratio − 1",
            {"largest ratio": curve("max_ratio", above_one)},
            ratio_bounds + bounds("max_ratio", above_one),
        ),
        _distance(
            "mismatch-ess",
            f"1 − ESS: at worst {number(worst['ess'] and 1 - worst['ess'])}",
            "share of the samples lost",
            {"1 − ESS": curve("ess", below_one)},
            bounds("ess", below_one),
        ),
        _distance("mismatch-chi2", f"chi²: at worst {number(chi2)}", "chi²", {"chi²": curve("chi2")}, []),
        _distance(
            "mismatch-shares",
            f"tokens without weight: at worst {number(dropped)}",
            "share of the tokens",
            shares,
            [],
        ),
    ]
    return [figure for figure in figures if figure is not None]


def _distance(
    key: str, title: str, unit: str, curves: dict[str, list[tuple[int, float]]], bounds: list[tuple[float, str]]
) -> Figure | None:
    """None where no step has the figure."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return None
    positive = [y for _, y in points if y > 0] + [b for b, _ in bounds]
    low, high = (min(positive), max(positive)) if positive else (1e-6, 1.0)
    steps = [x for x, _ in points]
    plot = Plot(
        f"Mismatch by step: {title}",
        Steps(min(steps), max(steps)),
        Log(low / 3, max(high, low * 10)),
        x_label="optimizer step",
        y_label=unit,
        width=SMALL,
    )
    for bound, label in bounds:
        plot.bound(bound, label)
    drawn = {name: curve for name, curve in curves.items() if curve}
    for n, (name, curve) in enumerate(drawn.items(), start=1):
        plot.series(curve, f"c{n}", name)
    legend = [(f"c{n}", name) for n, name in enumerate(drawn, start=1)] if len(drawn) > 1 else []
    return Figure(key, title, plot.svg(), "", legend)


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
