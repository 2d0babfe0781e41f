"""Small inline SVG charts. Colours are CSS classes of the page, so that they follow its light and dark themes."""

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 44
SMALL = 320  # width of pictures that stand three in a row
MARKED = 40  # longest series whose points are marked
CHAR = 6.4  # widest usual advance of 12 px text


def number(value: float | None, digits: int = 3) -> str:
    """`value` to `digits` significant digits as people write it, or a dash where it is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -3 or size > 5:
        mantissa, exponent = f"{value:.{max(0, digits - 2)}e}".split("e")
        text = f"{_plain(mantissa)}e{int(exponent)}"
    else:
        text = _plain(f"{value:,.{max(0, digits - 1 - size)}f}")
    return text.replace("-", "−")


def _plain(decimal: str) -> str:
    return decimal.rstrip("0").rstrip(".") if "." in decimal else decimal


def sign(comparison: str) -> str:
    """A comparison as it is printed."""
    return {">=": "≥", "<=": "≤"}.get(comparison, comparison)


class Linear:
    """A linear scale over [low, high], widened to round ticks unless `exact`."""

    def __init__(self, low: float, high: float, *, exact: bool = False, ticks: int = 5) -> None:
        if high - low <= 1e-5 * max(abs(low), abs(high)) or high - low < 1e-300:  # nothing to tell apart
            high = low + (abs(low) if abs(low) > 1e-300 else 1.0)
        raw = (high - low) / ticks
        magnitude = 10 ** math.floor(math.log10(raw))
        step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
        self.low = low if exact else math.floor(low / step + 1e-9) * step
        self.high = high if exact else math.ceil(high / step - 1e-9) * step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        self.ticks = [i * step for i in range(first, last + 1)]

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        return f"{tick:.6g}".replace("-", "−")


class Steps(Linear):
    """Whole numbers first..last with half a step of margin on both sides; `names` replaces some of their labels."""

    def __init__(self, first: int, last: int, names: dict[int, str] | None = None) -> None:
        super().__init__(first - 0.5, last + 0.5, exact=True)
        self.names = names or {}
        if last - first < 8:
            self.ticks = list(range(first, last + 1))
        self.ticks = sorted({*(t for t in self.ticks if float(t).is_integer()), *self.names})

    def label(self, tick: float) -> str:
        return self.names.get(int(tick)) or super().label(tick)


class Log:
    """Whole decades around [low, high]; values at or below zero sit on the lower edge.

    fine: with ticks at 2 and 5 too, where there are no more than two decades.
    """

    def __init__(self, low: float, high: float, *, fine: bool = False) -> None:
        self.first = math.floor(math.log10(low) + 1e-9)
        self.last = max(self.first + 1, math.ceil(math.log10(high) - 1e-9))
        stride = max(1, math.ceil((self.last - self.first) / 5))
        self.ticks = [10.0**e for e in range(self.last, self.first - 1, -stride)]
        if fine and self.last - self.first <= 2:
            self.ticks += [m * 10.0**e for e in range(self.first, self.last) for m in (2, 5)]

    def at(self, value: float) -> float:
        if value <= 0:
            return 0.0
        return min(1.0, max(0.0, (math.log10(value) - self.first) / (self.last - self.first)))

    def label(self, tick: float) -> str:
        exponent = round(math.log10(tick))
        if abs(tick / 10.0**exponent - 1) > 1e-6:
            return number(tick)
        return {0: "1", 1: "10", 2: "100", -1: "0.1", -2: "0.01"}.get(exponent, f"1e{exponent}").replace("-", "−")


class Bands:
    """One band a name, the first on top. Positions are (name, offset), offset from -0.5 (top) to 0.5 of the band."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.ticks = [(n, 0.0) for n in self.names]

    def at(self, position: tuple[str, float]) -> float:
        name, offset = position
        return 1 - (self.names.index(name) + 0.5 + offset) / len(self.names)

    def label(self, tick: tuple[str, float]) -> str:
        return tick[0]


class Plot:
    """One chart: scales, axes with their labels, marks in data coordinates.

    title: what the chart shows, for screen readers. width, height, left (kept for the labels of the y axis): pixels.
    """

    def __init__(
        self,
        title: str,
        x,
        y,
        *,
        x_label: str,
        y_label: str,
        width: int = WIDTH,
        height: int = HEIGHT,
        left: int = LEFT,
    ) -> None:
        self.title, self.x, self.y = title, x, y
        self.width, self.height, self.left = width, height, left
        self.top = TOP if y_label else 16
        self.marks: list[str] = []
        self._axes(x_label, y_label)

    def px(self, x) -> float:
        return self.left + self.x.at(x) * (self.width - self.left - RIGHT)

    def py(self, y) -> float:
        bottom = self.height - BOTTOM
        return bottom - self.y.at(y) * (bottom - self.top)

    def _axes(self, x_label: str, y_label: str) -> None:
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        for tick in self.y.ticks:
            y = self.py(tick)
            if not isinstance(self.y, Bands):
                self.marks.append(f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(self.left - 7, y + 4, self.y.label(tick), anchor="end", cls="tick")
        for tick in self.x.ticks:
            x = self.px(tick)
            if isinstance(self.y, Bands):
                self.marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom}"/>')
            self.text(x, bottom + 17, self.x.label(tick), anchor="middle", cls="tick")
        if not isinstance(self.y, Bands):
            self.marks.append(f'<line class="axis" x1="{self.left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        self.text((self.left + right) / 2, self.height - 8, x_label, anchor="middle", cls="axis-label")
        self.text(2, 10, y_label, cls="axis-label")

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", cls: str = "") -> None:
        """Text at pixel (x, y), its anchor kept inside the picture."""
        half = len(text) * CHAR * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        x = min(max(x, half), self.width - len(text) * CHAR + half) if anchor != "end" else x
        self.marks.append(f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, points: Sequence[tuple], cls: str) -> None:
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        self.marks.append(f'<polyline class="line {cls}" points="{path}"/>')

    def dot(self, x, y, cls: str, tip: str, *, radius: float = 4.5) -> None:
        self.marks.append(
            f'<circle class="dot {cls}" cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="{radius}">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def series(self, points: Sequence[tuple], cls: str, name: str) -> None:
        """A line with its points marked while they can be told apart."""
        self.line(points, cls)
        for x, y in points if len(points) <= MARKED else []:
            self.dot(x, y, cls, f"step {x}: {name} {number(y)}")

    def span(self, start: tuple, end: tuple, cls: str) -> None:
        """A straight line between two points: an interval, or a change."""
        (x1, y1), (x2, y2) = start, end
        self.marks.append(
            f'<line class="span {cls}" x1="{self.px(x1):.1f}" y1="{self.py(y1):.1f}" '
            f'x2="{self.px(x2):.1f}" y2="{self.py(y2):.1f}"/>'
        )

    def bar(self, corner: tuple, opposite: tuple, cls: str, tip: str) -> None:
        x1, x2 = sorted((self.px(corner[0]), self.px(opposite[0])))
        y1, y2 = sorted((self.py(corner[1]), self.py(opposite[1])))
        self.marks.append(
            f'<rect class="bar {cls}" x="{x1:.1f}" y="{y1:.1f}" width="{x2 - x1:.1f}" height="{y2 - y1:.1f}">'
            f"<title>{escape(tip)}</title></rect>"
        )

    def bound(self, value, label: str, cls: str = "bound") -> None:
        """A dashed rule at `value` of the measured axis, named."""
        if isinstance(self.y, Bands):
            x = self.px(value)
            self.marks.append(
                f'<line class="{cls}" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{self.height - BOTTOM}"/>'
            )
            self.text(x, self.top - 4, label, anchor="middle", cls="note")
        else:
            y = self.py(value)
            self.marks.append(
                f'<line class="{cls}" x1="{self.left}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self.text(self.width - RIGHT, y - 4, label, anchor="end", cls="note")

    def note(self, x, y, text: str, *, dx: float = 8, dy: float = 4, anchor: str = "start", cls: str = "note") -> None:
        """A label beside a mark."""
        self.text(self.px(x) + dx, self.py(y) + dy, text, anchor=anchor, cls=cls)

    def svg(self) -> str:
        title = escape(self.title, quote=True)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{title}">'
            + "".join(self.marks)
            + "</svg>"
        )
