"""What a plot function gives to the page."""

from dataclasses import dataclass, field

from tasks.report.plots.svg import number
from tasks.report.summary import Estimate


@dataclass(frozen=True)
class Figure:
    """A picture with its words.

    key: HTML id; title: the finding in one line; legend: (CSS class, name) where marks carry no label of their own.
    """

    key: str
    title: str
    svg: str
    caption: str = ""
    legend: list[tuple[str, str]] = field(default_factory=list)


def interval(estimate: Estimate | None, digits: int = 3) -> str:
    """`0.21 [0.18, 0.24]`, or the value alone where no interval is known."""
    if estimate is None:
        return "–"
    text = number(estimate.value, digits)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{number(estimate.low, digits)}, {number(estimate.high, digits)}]"
