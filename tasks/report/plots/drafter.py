"""Pictures of the drafter: how it learned, and what it accepts."""

import pandas as pd

from tasks.report.plots.compare import changes
from tasks.report.plots.figure import Figure
from tasks.report.plots.svg import SMALL, Linear, Plot, Steps, number
from tasks.report.summary import Acceptance, AcceptanceChange, Estimate


def curve(steps: pd.DataFrame) -> Figure:
    """Loss by optimizer step, with the held-out loss where it was measured."""
    series = [(c, cls) for c, cls in (("loss", "c1"), ("held_out_loss", "c2")) if c in steps]
    known = {c: steps[["step", c]].dropna() for c, _ in series}
    top = max(frame[c].max() for c, frame in known.items())
    x = Steps(int(steps["step"].min()), int(steps["step"].max()))
    plot = Plot("Drafter training", x, Linear(0, float(top)), x_label="optimizer step", y_label="loss, nats")
    names = {"loss": "training", "held_out_loss": "held out"}
    for column, cls in series:
        points = [(s, float(v)) for s, v in known[column].itertuples(index=False)]
        plot.line(points, cls)
        for step, value in points if len(points) <= 20 else []:
            plot.dot(step, value, cls, f"step {step}: {names[column]} loss {number(value)}", radius=3)
    first, last = float(known["loss"]["loss"].iloc[0]), float(known["loss"]["loss"].iloc[-1])
    title = f"Drafter training: loss {number(first)} → {number(last)}"
    return Figure("drafter-training", title, plot.svg(), "", [(cls, names[c]) for c, cls in series])


def lengths(acceptance: AcceptanceChange) -> Figure:
    """Acceptance length by domain, before and after training."""
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
    for domain in dict.fromkeys([*acceptance.after, *acceptance.before]):
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
            plot.note(start + width / 2, 100 * rate, f"{100 * rate:.0f}", dx=0, dy=-5, anchor="middle")
    n = ", ".join(f"{name} {a.n} drafts" for name, _, a in sides)
    return Figure(
        f"acceptance-{domain}", f"Accepted by position: {domain}", plot.svg(), n + ".", [(c, m) for m, c, _ in sides]
    )


def _length(acceptance: Acceptance | None) -> Estimate | None:
    return acceptance and Estimate(value=acceptance.length, n=acceptance.n)
