"""The report of one loop: a page that needs nothing but itself, a Markdown summary, and the summary as JSON."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from infra.services import durations
from tasks.report.headline import MARK, headline, tiles
from tasks.report.measured import Measured
from tasks.report.plots import compare, drafter, lineage, quant, rl, time, timeline
from tasks.report.plots.figure import Figure
from tasks.report.plots.svg import number, sign
from tasks.report.rollouts import groups
from tasks.report.summary import LoopSummary

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    figures: list[Figure]
    words: str = ""
    small: bool = False
    """Pictures stand three in a row."""


def build(folder: Path, summary: LoopSummary, measured: Measured) -> Path:
    """Write index.html, summary.md and summary.json into `folder` and return the page's path.

    What was not measured is absent from the page.
    """
    from jinja2 import Environment, FileSystemLoader

    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    summary = summary.model_copy(update={"report": str(page.absolute())})
    shown = groups(measured.rollouts)
    context = {
        "s": summary,
        "headline": headline(summary),
        "mark": MARK,
        "tiles": tiles(summary),
        "sections": sections(summary, measured),
        "kinds": [{"key": key, "name": name} for key, (_, name) in time.KINDS.items()],
        "times": {name: time.seconds_by_kind(phase) for name, phase in summary.phases.items()},
        "groups": shown,
        "rollout_count": sum(len(g["rows"]) for g in shown),
        "rollout_total": len(measured.rollouts),
        "rollout_steps": list(dict.fromkeys(g["step"] for g in shown)),
        "environments": list(dict.fromkeys(g["environment"] for g in shown)),
        "evidence": measured.evidence.to_dict("records"),
        "sources": sources(measured.evidence),
        "style": (TEMPLATES / "style.css").read_text(),
        "script": (TEMPLATES / "script.js").read_text(),
    }
    for name, escaped in (("index.html", True), ("summary.md", False)):
        environment = Environment(
            loader=FileSystemLoader(TEMPLATES), autoescape=escaped, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters |= FILTERS
        (folder / name).write_text(environment.get_template(f"{name}.j2").render(context))
    (folder / "summary.json").write_text(json.dumps(summary.model_dump(mode="json"), indent=1) + "\n")
    return page


FILTERS = {
    "number": number,
    "sign": sign,
    "moment": lambda text: f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC",
    "duration": durations.words,
    "seconds": lambda value: "" if value is None else f"{value:.1f}",
    "shorten": lambda text: text if len(text) <= 90 else text[:88] + " …",
    "digest": lambda text: text.removeprefix("sha256:")[:12],
    "cell": lambda text: text.replace("|", "\\|").replace("\n", " "),
}


def sections(s: LoopSummary, measured: Measured) -> list[Section]:
    """The page's pictures; sections without one are left out."""
    training = []
    if not measured.steps.empty:
        training.append(rl.reward(measured.steps, s.rewards))
    if not measured.timeline.empty:
        training.append(timeline.workers(measured.timeline))
    if measured.rollouts:
        training.append(rl.lengths(measured.rollouts))
    if s.tasks:
        rows = [(task or "all", c.before, c.after) for task, c in s.tasks.items()]
        unit = "share of the questions answered right"
        training.append(compare.changes("tasks", "General questions, parent and new target", rows, unit=unit, origin=0))
    drafting = [] if measured.curve.empty else drafter.curve(measured.curve)
    by_position = []
    if s.acceptance.after or s.acceptance.before:
        drafting.append(drafter.lengths(s.acceptance))
        by_position = drafter.positions(s.acceptance)
    distance = "Distance from perfect agreement on log axes: lower is better."
    mismatch = rl.mismatch(s.mismatch) if s.mismatch else []
    fidelity = quant.fidelity(s.quant, s.gates) if s.quant else []
    rates = "Unconditional: acceptance length is 1 + the sum of the rates."
    drawn = [
        Section("overview", "Versions and time", _overview(s)),
        Section("training", "Reinforcement learning", training),
        Section("mismatch", "Mismatch of engine and trainer", mismatch, distance, small=True),
        Section("drafter", "Drafter", drafting),
        Section("acceptance", "Acceptance by position", by_position, rates, small=True),
        Section("quant", f"Quant {s.quant.scheme}" if s.quant else "", fidelity),
    ]
    return [section for section in drawn if section.figures]


def _overview(s: LoopSummary) -> list[Figure]:
    figures = [lineage.picture(s.versions, s.released, s.quant.scheme if s.quant else "")]
    return [*figures, time.phases(s.phases)] if s.phases else figures


def sources(evidence: pd.DataFrame) -> list[dict[str, Any]]:
    """Where the figures come from: rows by engine, hardware and command."""
    by_source = evidence.groupby(["engine", "hardware", "command"], sort=False).size()
    return by_source.rename("rows").reset_index().to_dict("records")
