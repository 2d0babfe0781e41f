"""What a run came to, as the terminal shows it."""

from typing import Any

from infra.services.runs import Run


def text(run: Run) -> str:
    """The outcome of `run` as plain lines."""
    if run.flow == "loop":
        from tasks.report.summary import LoopSummary
        from tasks.report.text import terminal

        return terminal(LoopSummary.model_validate(run.outcome))
    if run.flow == "quantize":
        from infra.store.refs import ArtifactRef
        from tasks.quant.steps import read_evidence
        from tasks.quant.text import terminal as quant_text

        found, table = run.outcome, read_evidence(ArtifactRef.model_validate(run.outcome["evidence"]))
        tried = f", {found['drafter']} tried on it" if found["drafter"] else ""
        return quant_text(f"{found['quant']}: {found['scheme']} of {found['target']}{tried}", table)
    if run.flow == "watch":
        from tasks.drafter.drift import Drift
        from tasks.drafter.drift_text import terminal

        measured = f"{run.outcome['drafter'] or 'no drafter'} on {run.outcome['target']}"
        return terminal(measured, Drift.model_validate(run.outcome["drift"]), run.outcome["kept"])
    if run.flow == "review":
        from tasks.report.review.findings import Review
        from tasks.report.review.page import terminal as review_text

        return f"{review_text(Review.model_validate(run.outcome))}\n\npage: {run.folder / 'review' / 'index.html'}"
    return "\n".join(f"{name:<20} {_short(value)}" for name, value in _flat(run.outcome))


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows = []
    for name, inner in value.items():
        if isinstance(inner, dict):
            rows += _flat(inner, f"{prefix}{name}.")
        elif inner not in (None, [], ""):
            rows.append((prefix + name, inner))
    return rows


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"{len(value)} rows" if isinstance(value[0], dict) else ", ".join(map(str, value))
    return str(value)
