"""What was found of a watched drafter, for people."""

from tasks.drafter.drift import Drift, Level
from tasks.evaluate.page import table

WHAT = {
    "keep": "kept: it may be released with this target",
    "refresh": "drifted: it is to be trained on",
    "retrain": "drifted: it is to be trained from nothing",
}


def records(drift: Drift) -> list[dict[str, str]]:
    """One row a domain, for a table in Prefect."""
    return [
        {
            "domain": domain,
            "acceptance length": f"{level.value:.3f}",
            "95% interval": f"{level.low:.3f} to {level.high:.3f}",
            "when made": _value(drift.before.get(domain)),
            "lost": _lost(drift.before.get(domain), level),
            "drafts": f"{level.n:,}",
        }
        for domain, level in drift.now.items()
    ]


def markdown(title: str, drift: Drift, seconds: float) -> str:
    """A page: the decision, why, and acceptance by domain. seconds: what it took to know."""
    lines = [f"# {title}", "", f"**{WHAT[drift.decision]}**. {drift.reason[0].upper()}{drift.reason[1:]}.", ""]
    if rows := records(drift):
        lines += [*table(rows), ""]
    if drift.lost is not None:
        ends = f"{drift.lost_low:.1%} to {drift.lost_high:.1%}"
        lines += [f"Acceptance length lost since it was made: {drift.lost:.1%} (95% interval {ends}).", ""]
    return "\n".join([*lines, f"Measuring took {seconds:.0f} s of engine time."]) + "\n"


def terminal(measured: str, drift: Drift, kept: str | None) -> str:
    """The same for a terminal. measured: which drafter on what. kept: label of the drafter's version for the target."""
    lines = [f"{measured}: {WHAT[drift.decision]}" + (f" as {kept}" if kept else ""), f"  {drift.reason}"]
    rows = records(drift)
    if rows:
        cells = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def metrics(drift: Drift, seconds: float) -> dict[str, float]:
    """Metrics for MLflow: `figure/domain`."""
    named = {f"acceptance_length/{domain}": level.value for domain, level in drift.now.items()}
    lost = {} if drift.lost is None else {"acceptance_lost": drift.lost}
    return named | lost | {"measuring_seconds": seconds}


def _value(level: Level | None) -> str:
    return "never measured" if level is None else f"{level.value:.3f}"


def _lost(before: Level | None, now: Level) -> str:
    return "" if before is None else f"{1 - now.value / before.value:.1%}"
