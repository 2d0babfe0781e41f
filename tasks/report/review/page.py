"""The review as a page, as Markdown, as JSON, and as the terminal shows it."""

import re
from functools import partial
from pathlib import Path

from tasks.report.build import FILTERS, TEMPLATES
from tasks.report.review.findings import Review

_RUN = re.compile(r"MLflow run (?P<id>[0-9a-f]{32})")
MARK = {"pass": "✓", "fail": "✗", "unknown": "?"}


def headline(review: Review) -> str:
    """One line: the release, and how many questions it passes."""
    count = review.count
    told = [f"{count[v]} {v}" for v in ("pass", "fail", "unknown") if count[v]]
    return f"{review.release}: {', '.join(told)}"


def write(folder: Path, review: Review, runs: str = "") -> Path:
    """Write index.html, review.md and review.json into `folder` and return the page's path.

    runs: what an id is put behind for the address of an MLflow run, "" where it has none.
    """
    from jinja2 import Environment, FileSystemLoader

    folder.mkdir(parents=True, exist_ok=True)
    context = {
        "review": review,
        "headline": headline(review),
        "mark": MARK,
        "style": (TEMPLATES / "style.css").read_text(),
    }
    for name, template, escaped in (
        ("index.html", "review.html.j2", True),
        ("review.md", "review.md.j2", False),
    ):
        environment = Environment(
            loader=FileSystemLoader(TEMPLATES), autoescape=escaped, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters |= FILTERS | {"source": partial(_source, runs), "linked": partial(_linked, runs)}
        (folder / name).write_text(environment.get_template(template).render(context))
    (folder / "review.json").write_text(review.model_dump_json(indent=1) + "\n")
    return folder / "index.html"


def terminal(review: Review) -> str:
    """The review as plain lines."""
    lines = [headline(review)]
    for finding in review.findings:
        lines += ["", f"{MARK[finding.verdict]} {finding.question}", f"  {finding.verdict}: {finding.because}"]
        width = max((len(fact.name) for fact in finding.facts), default=0)
        lines += [f"    {fact.name:<{width}}  {fact.value}" for fact in finding.facts]
        lines += [f"    from {source}" for source in dict.fromkeys(fact.source for fact in finding.facts)]
        lines += [f"  would change it: {finding.change}"]
    return "\n".join(lines)


def _source(runs: str, text: str) -> str:
    """HTML in which an address, or an MLflow run, is a link."""
    from markupsafe import Markup, escape

    if text.startswith("http"):
        return Markup('<a href="{0}">{0}</a>').format(text)
    return Markup(_RUN.sub(rf'<a href="{escape(runs)}\g<id>">MLflow run</a>', str(escape(text)))) if runs else text


def _linked(runs: str, text: str) -> str:
    """The same in Markdown."""
    if text.startswith("http"):
        return f"<{text}>"
    return _RUN.sub(rf"[MLflow run]({runs}\g<id>)", text) if runs else text
