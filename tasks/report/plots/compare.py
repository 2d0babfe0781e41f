"""Rows of values on one axis: before against after, and single estimates with their intervals."""

from collections.abc import Sequence

from tasks.report.plots.figure import Figure, interval
from tasks.report.plots.svg import CHAR, Bands, Linear, Log, Plot, number
from tasks.report.summary import Estimate

ROW = 54


def changes(
    key: str,
    title: str,
    rows: Sequence[tuple[str, Estimate | None, Estimate | None]],
    *,
    unit: str,
    names: tuple[str, str] = ("before", "after"),
    origin: float | None = None,
    bound: tuple[float, str] | None = None,
    caption: str = "",
) -> Figure:
    """A dumbbell a row: (name, before, after). origin: value the axis must reach."""
    values = [v for _, *pair in rows for e in pair if e for v in (e.value, e.low, e.high) if v is not None]
    values += [origin] if origin is not None else []
    values += [bound[0]] if bound else []
    plot = _rows(title, [name for name, *_ in rows], Linear(min(values), max(values), ticks=4), unit)
    if bound:
        plot.bound(*bound)
    for name, before, after in rows:
        for estimate, cls, offset in ((before, "c0", -0.14), (after, "c1", 0.14)):
            if estimate and estimate.low is not None and estimate.high is not None:
                plot.span((estimate.low, (name, offset)), (estimate.high, (name, offset)), f"{cls} faint")
        if before and after and before.value is not None and after.value is not None:
            plot.span((before.value, (name, -0.14)), (after.value, (name, 0.14)), "change")
        for estimate, side, cls, offset in ((before, names[0], "c0", -0.14), (after, names[1], "c1", 0.14)):
            if estimate and estimate.value is not None:
                tip = f"{name}, {side}: {interval(estimate)} {unit}, n={estimate.n}"
                plot.dot(estimate.value, (name, offset), cls, tip)
                above = offset < 0
                plot.note(estimate.value, (name, offset), number(estimate.value), dx=0, dy=-7 if above else 17,
                          anchor="middle")  # fmt: skip
    sides = [("c0", names[0], 1), ("c1", names[1], 2)]
    legend = [(cls, side) for cls, side, column in sides if any(row[column] for row in rows)]
    return Figure(key, title, plot.svg(), caption, legend)


def values(
    key: str,
    title: str,
    rows: Sequence[tuple[str, Estimate]],
    *,
    unit: str,
    log: bool = False,
    digits: int = 3,
    origin: float | None = None,
    bound: tuple[float, str] | None = None,
    caption: str = "",
) -> Figure:
    """One dot a row with its interval; on a log axis when the figure spans decades."""
    shown = [v for _, e in rows for v in (e.value, e.low, e.high) if v is not None] + ([bound[0]] if bound else [])
    if log:
        positive = [v for v in shown if v > 0] or [1e-3, 1.0]
        scale = Log(min(positive), max(positive))
    else:
        shown += [origin] if origin is not None else []
        scale = Linear(min(shown), max(shown), ticks=4)
    plot = _rows(title, [name for name, _ in rows], scale, unit)
    if bound:
        plot.bound(*bound)
    for name, estimate in rows:
        if estimate.value is None:
            continue
        if estimate.low is not None and estimate.high is not None:
            plot.span((estimate.low, (name, 0)), (estimate.high, (name, 0)), "c1")
        plot.dot(estimate.value, (name, 0), "c1", f"{name}: {interval(estimate)} {unit}, n={estimate.n}")
        plot.note(estimate.value, (name, 0), number(estimate.value, digits), dx=0, dy=-9, anchor="middle")
    return Figure(key, title, plot.svg(), caption)


def _rows(title: str, names: list[str], scale, unit: str) -> Plot:
    left = min(170, 22 + int(CHAR * max(len(n) for n in names)))
    return Plot(title, scale, Bands(names), x_label=unit, y_label="", height=ROW * len(names) + 64, left=left)
