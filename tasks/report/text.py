"""The summary as the terminal shows it at the end of a run."""

from infra.services import durations
from tasks.report.headline import MARK, headline, tiles
from tasks.report.plots.svg import number, sign
from tasks.report.plots.time import KINDS, seconds_by_kind
from tasks.report.summary import LoopSummary


def terminal(s: LoopSummary) -> str:
    """Verdict, key figures, gates, time by phase, and where to look further, as plain lines."""
    lines = [f"{MARK[s.verdict]} {headline(s)} in {durations.words(s.wall_s)}"]
    lines += [f"  {line}" for line in ([s.error] if s.error else []) + s.released.reasons]
    lines += ["", *_columns([(t["name"], t["value"], t["words"]) for t in tiles(s)])]
    if s.gates:
        rows = [(f"{MARK[g.verdict]} {g.name}", g.domain, *_against_bound(g)) for g in s.gates]
        lines += ["", "gates", *_columns(rows)]
    if s.phases:
        lines += ["", "phases", *_columns([_phase(name, phase) for name, phase in s.phases.items()])]
    where = {"report": s.report} | s.addresses
    return "\n".join([*lines, "", *_columns([(name, address) for name, address in where.items() if address])])


def _against_bound(gate) -> tuple[str, str]:
    compared = getattr(gate, gate.side)
    end = "" if gate.side == "value" else f"{gate.side} of the interval "
    return f"{end}{number(compared)}", f"must be {sign(gate.comparison)} {number(gate.bound)}"


def _phase(name, phase) -> tuple[str, str, str]:
    kinds = ", ".join(f"{KINDS[kind][1]} {seconds:.0f}" for kind, seconds in seconds_by_kind(phase).items())
    return name, f"{phase.seconds:.0f} s" + (" (cached)" if phase.cached else ""), kinds


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows with their columns aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
