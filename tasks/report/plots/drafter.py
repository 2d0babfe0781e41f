"""Pictures of the drafter: how it learned, and what it accepts."""

import pandas as pd

from tasks.report.plots.compare import changes
from tasks.report.plots.figure import Figure
from tasks.report.plots.svg import SMALL, Linear, Plot, Steps, number
from tasks.report.summary import Acceptance, AcceptanceChange, Estimate


def curve(steps: pd.DataFrame) -> list[Figure]:
    """Loss by optimizer step, and the acceptance length estimated on held-out answers where it was measured."""
    figures = []
    for column, key, name, unit, floor in (
        ("loss", "drafter-loss", "Drafter training: loss", "loss over all steps of training-time test, nats", 0.0),
        ("held_out_acceptance", "drafter-held-out", "Held-out acceptance length", "tokens per pass, estimated", 1.0),
    ):
        known = steps[["step", column]].dropna() if column in steps else steps.head(0)
        if known.empty:
            continue
        points = [(int(s), float(v)) for s, v in known.itertuples(index=False)]
        x = Steps(points[0][0], points[-1][0])
        y = Linear(floor, max(max(v for _, v in points), floor + 0.1))
        plot = Plot(name, x, y, x_label="optimizer step", y_label=unit)
        plot.series(points, "c1", name)
        title = f"{name} {number(points[0][1])} → {number(points[-1][1])}"
        figures.append(Figure(key, title, plot.svg()))
    return figures


def lengths(acceptance: AcceptanceChange) -> Figure:
    """Acceptance length by domain, of what the drafter was warmed from, if anything, and of the drafter."""
    domains = dict.fromkeys([*acceptance.after, *acceptance.before])
    rows = [(d, _length(acceptance.before.get(d)), _length(acceptance.after.get(d))) for d in domains]
    depth = max((len(a.by_position) for a in acceptance.after.values()), default=0)
    caption = "1 is no proposal accepted" + (f", {depth + 1} is every proposal accepted." if depth else ".")
    return changes(
        "acceptance-length",
        "Acceptance length by domain",
        rows,
        unit="tokens per target pass",
        origin=1.0,
        caption=caption,
    )


def positions(acceptance: AcceptanceChange) -> list[Figure]:
    """Acceptance rate by position, one picture a domain."""
    shown = [a for side in (acceptance.before, acceptance.after, acceptance.on_quant) for a in side.values()]
    top = max((rate for a in shown for rate in a.by_position), default=0.0)
    figures = []
    domains = dict.fromkeys([*acceptance.after, *acceptance.before])
    for domain in [d for d in domains if d != "all"] or domains:
        sides = [
            ("before", "c0", acceptance.before.get(domain)),
            ("after", "c1", acceptance.after.get(domain)),
            ("on the quant", "c3", acceptance.on_quant.get(domain)),
        ]
        sides = [(name, cls, a) for name, cls, a in sides if a and a.by_position]
        if sides:
            figures.append(_by_position(domain, sides, top))
    return figures


def _by_position(domain: str, sides: list[tuple[str, str, Acceptance]], top: float) -> Figure:
    depth = max(len(a.by_position) for _, _, a in sides)
    y = Linear(0, 100 * max(top, 0.05))
    labels = dict(x_label="position", y_label="% of drafts accepted")
    plot = Plot(f"Acceptance by position: {domain}", Steps(1, depth), y, **labels, width=SMALL)
    width = 0.8 / len(sides)
    for i, (name, cls, acceptance) in enumerate(sides):
        for position, rate in enumerate(acceptance.by_position, start=1):
            start = position - 0.4 + i * width
            tip = f"{domain}, position {position}, {name}: {rate:.1%} of {acceptance.n} drafts"
            plot.bar((start + 0.01, 0), (start + width - 0.01, 100 * rate), cls, tip)
            plot.note(
                start + width / 2, 100 * rate, f"{100 * rate:.0f}", dx=0, dy=-5, anchor="middle", cls="note crowded"
            )
    n = ", ".join(f"{name} {a.n} drafts" for name, _, a in sides)
    return Figure(
        f"acceptance-{domain}", f"Accepted by position: {domain}", plot.svg(), n + ".", [(c, m) for m, c, _ in sides]
    )


def _length(acceptance: Acceptance | None) -> Estimate | None:
    return acceptance and Estimate(value=acceptance.length, low=acceptance.low, high=acceptance.high, n=acceptance.n)
