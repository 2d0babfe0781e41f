"""Weight transports as `lockstep measure transport` found them on this machine, beside those that a training used."""

import pandas as pd

from tasks.report.plots.svg import number
from tasks.report.review.findings import Fact


def transports(measured: pd.DataFrame, source: str, target: str, step_s: float | None) -> list[Fact]:
    """A fact for each transport, of the target's own weights or else of the largest model that was moved, and one for
    each plan of a fleet.

    measured: evidence of the measurement; `domain` is transport/model, in the rows of a plan the transport.
    step_s: mean seconds of a step of the target's training, None where it is not known.
    """
    found = []
    for transport, rows in measured.groupby(measured["domain"].str.split("/").str[0], sort=False):
        moved = [_figures(of) for _, of in rows[rows["domain"].str.contains("/")].groupby("domain", sort=False)]
        chosen = next((m for m in moved if m["domain"] == f"{transport}/{target}"), None)
        own, chosen = chosen is not None, chosen or max(moved, key=_gb, default=None)
        if chosen:
            told = _told(chosen) + (_share(chosen, step_s) if own and step_s else "")
            found.append(Fact(name=f"measured: {chosen['domain'].replace('/', ', ')}", value=told, source=source))
        plan = _figures(rows[rows["domain"] == transport])
        if "plan_gb" in plan:
            found.append(Fact(name=f"sized for a fleet: {transport}", value=_planned(plan), source=source))
    return found


def _figures(rows: pd.DataFrame) -> dict:
    return dict(zip(rows["figure"], rows["value"], strict=True)) | {
        "domain": rows["domain"].iloc[0] if len(rows) else ""
    }


def _gb(figures: dict) -> float:
    return figures["transport_gb_per_s"] * figures["transport_transfer_s"]


def _update_s(figures: dict) -> float:
    return sum(figures[f"transport_{part}_s"] for part in ("publish", "prepare", "pause"))


def _told(figures: dict) -> str:
    return (
        f"{number(_gb(figures))} GB at {number(figures['transport_gb_per_s'])} GB/s, "
        f"{number(100 * figures['transport_share_of_copy'], 2)}% of a plain copy; an update takes "
        f"{number(_update_s(figures))} s, the pause {number(figures['transport_pause_s'])} s of it"
    )


def _share(figures: dict, step_s: float) -> str:
    return f"; {number(100 * _update_s(figures) / step_s, 2)}% of a step of this target's training"


def _planned(figures: dict) -> str:
    enough = figures["plan_gb_per_s"] >= figures["plan_needed_gb_per_s"]
    return (
        f"{number(figures['plan_gb'])} GB an engine need {number(figures['plan_needed_gb_per_s'])} GB/s, "
        f"{number(figures['plan_gb_per_s'])} GB/s all counted: {'enough' if enough else 'too slow'}"
    )
