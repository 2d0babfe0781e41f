"""The page of one measurement: its findings, charts, table and evidence."""

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.evaluate.measurement import Measured, Picture
from tasks.report.build import FILTERS, TEMPLATES, sources
from tasks.report.plots.figure import Figure
from tasks.report.plots.svg import Linear, Log, Plot, number

if TYPE_CHECKING:
    import pandas as pd

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c0")


def write_page(folder: Path, what: str, measured: Measured, evidence: "pd.DataFrame") -> Path:
    """Write index.html and table.md into the new `folder`; the page's path."""
    from jinja2 import Environment, FileSystemLoader

    folder.mkdir(parents=True)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= FILTERS
    page = folder / "index.html"
    page.write_text(
        environment.get_template("measurement.html.j2").render(
            what=what,
            measured=measured,
            columns=list(measured.table[0]) if measured.table else [],
            figures=[draw(f"picture-{i}", picture) for i, picture in enumerate(measured.pictures)],
            evidence=evidence.to_dict("records"),
            sources=sources(evidence),
            style=(TEMPLATES / "style.css").read_text(),
        )
    )
    (folder / "table.md").write_text(markdown(measured))
    return page


def markdown(measured: Measured) -> str:
    """Table and findings in Markdown."""
    if not measured.table:
        return "\n".join(measured.findings) + "\n"
    columns = list(measured.table[0])
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(_cell(row[column]) for column in columns)} |" for row in measured.table]
    return "\n".join([*lines, "", *measured.findings]) + "\n"


def draw(key: str, picture: Picture) -> Figure:
    """A chart with one coloured line a curve."""
    xs = [x for line in picture.lines for x, _ in line.points]
    ys = [y for line in picture.lines for _, y in line.points]
    x_axis = Log(min(xs), max(xs), fine=True) if picture.log_x else Linear(0, max(xs))
    y_axis = Log(min(ys), max(ys), fine=True) if picture.log_y else Linear(0, max(ys))
    plot = Plot(picture.title, x_axis, y_axis, x_label=picture.x_label, y_label=picture.y_label)
    own = [line.name for line in picture.lines if not line.beside]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(own)}
    legend = []
    for line in picture.lines:
        colour = colours[line.beside or line.name]
        plot.line(line.points, f"{colour} dashed" if line.beside else colour)
        for x, y in line.points:
            plot.dot(x, y, colour, f"{line.name}: {number(y)} {picture.y_label} at {number(x)} {picture.x_label}")
        legend.append((colour, f"dashed: {line.name}" if line.beside else line.name))
    return Figure(key, picture.title, plot.svg(), legend=legend)


def _cell(value: str | float | int | None) -> str:
    return number(value) if isinstance(value, float) or value is None else str(value)
