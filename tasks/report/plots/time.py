"""Where the time of each phase went."""

from tasks.report.plots.figure import Figure
from tasks.report.plots.svg import Bands, Linear, Plot, number
from tasks.report.summary import SPAN_KINDS, Phase

KINDS = {
    "engine_start": ("c2", "engine start"),
    "engine": ("c1", "engine"),
    "trainer": ("c3", "trainer"),
    "sync": ("c4", "weight sync"),
    "quantize": ("c5", "quantize"),
    "overhead": ("c0", "overhead"),
}


def seconds_by_kind(phase: Phase) -> dict[str, float]:
    """Seconds of a phase by kind, in SPAN_KINDS' order, then `overhead`; kinds that took none are left out."""
    found = {kind: phase.spans.get(kind, 0.0) for kind in SPAN_KINDS} | {"overhead": phase.overhead}
    return {kind: seconds for kind, seconds in found.items() if seconds > 0}


def phases(by_name: dict[str, Phase]) -> Figure:
    """Stacked seconds, one bar a phase."""
    labels = {name: f"{name} (cached)" if p.cached else name for name, p in by_name.items()}
    totals = {name: sum(seconds_by_kind(p).values()) for name, p in by_name.items()}
    slowest = max(totals, key=lambda name: totals[name])
    left = 16 + int(6.4 * max(len(label) for label in labels.values()))
    plot = Plot(
        "Time by phase",
        Linear(0, totals[slowest] * 1.12),
        Bands(list(labels.values())),
        x_label="seconds",
        y_label="",
        height=38 * len(by_name) + 64,
        left=left,
    )
    used = dict.fromkeys(kind for p in by_name.values() for kind in seconds_by_kind(p))
    for name, phase in by_name.items():
        start, label = 0.0, labels[name]
        for kind, seconds in seconds_by_kind(phase).items():
            cls, words = KINDS[kind]
            tip = f"{label}: {words} {number(seconds)} s of {number(totals[name])} s"
            plot.bar((start, (label, -0.32)), (start + seconds, (label, 0.32)), cls, tip)
            start += seconds
        plot.note(start, (label, 0), f"{start:.0f} s", dx=6)
    cached = any(p.cached for p in by_name.values())
    return Figure(
        "time",
        f"The longest phase is {slowest}: {totals[slowest]:.0f} s",
        plot.svg(),
        "Cached: taken over from an interrupted run, with the seconds it took there." if cached else "",
        legend=[KINDS[kind] for kind in KINDS if kind in used],
    )
