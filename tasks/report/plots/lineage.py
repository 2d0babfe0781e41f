"""The versions of a loop and how they hang together, as a picture."""

from html import escape

from tasks.report.plots.figure import Figure
from tasks.report.summary import Released, Versions

BOX_W, BOX_H = 98, 54
COLUMNS = {"parent": 4, "target": 124, "drafter": 240, "quant": 240, "release": 356}
HEIGHT = 184
MIDDLE = HEIGHT / 2 - BOX_H / 2
ROWS = {"parent": MIDDLE, "target": MIDDLE, "drafter": 10, "quant": HEIGHT - BOX_H - 10, "release": MIDDLE}


def picture(versions: Versions, released: Released, scheme: str = "") -> Figure:
    """Parent -> target -> drafter and quant -> release; parts that were not released are dashed."""
    numbers = {kind: getattr(versions, kind) for kind in COLUMNS}
    present = {kind: n for kind, n in numbers.items() if n is not None}
    marks = []
    for start, end, label in (
        ("parent", "target", "RL"),
        ("target", "drafter", ""),
        ("target", "quant", ""),
        ("target", "release", ""),
        ("drafter", "release", ""),
        ("quant", "release", ""),
    ):
        if start in present and end in present:
            left_out = end == "release" and start in ("drafter", "quant") and not getattr(released, start)
            if not left_out:
                marks.append(_edge(start, end, label))
    for kind, n in present.items():
        title = {"parent": "target", "quant": f"quant {scheme}".strip()}.get(kind, kind)
        out = kind in ("drafter", "quant") and not getattr(released, kind)
        marks.append(_box(kind, title, f"{versions.name} v{n}", versions.digests.get(kind, ""), dashed=out))
    if versions.aliases and "release" in present:
        x, y = COLUMNS["release"] + BOX_W / 2, MIDDLE + BOX_H + 16
        for i, alias in enumerate(versions.aliases):
            marks.append(f'<text class="note" x="{x}" y="{y + 15 * i}" text-anchor="middle">@{escape(alias)}</text>')
    svg = f'<svg viewBox="0 0 460 {HEIGHT}" role="img" aria-label="Lineage">{"".join(marks)}</svg>'
    left_out = [k for k in ("drafter", "quant") if k in present and not getattr(released, k)]
    caption = f"Dashed: made, not released ({', '.join(left_out)})." if left_out else ""
    return Figure("lineage", "Lineage", svg, caption)


def _box(kind: str, title: str, name: str, digest: str, *, dashed: bool) -> str:
    x, y = COLUMNS[kind], ROWS[kind]
    short = digest.removeprefix("sha256:")[:8]
    lines = [("tick", title), ("strong", name)] + ([("tick mono", short)] if short else [])
    first = y + BOX_H / 2 + 4 - 7 * (len(lines) - 1)
    text = "".join(
        f'<text class="{cls}" x="{x + BOX_W / 2}" y="{first + 14 * i:.0f}" text-anchor="middle">{escape(line)}</text>'
        for i, (cls, line) in enumerate(lines)
    )
    return (
        f'<rect class="box{" dashed" if dashed else ""}" x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="6">'
        f"<title>{escape(digest)}</title></rect>{text}"
    )


def _edge(start: str, end: str, label: str) -> str:
    x1, y1 = COLUMNS[start] + BOX_W, ROWS[start] + BOX_H / 2
    x2, y2 = COLUMNS[end], ROWS[end] + BOX_H / 2
    middle = (x1 + x2) / 2
    path = f'<path class="edge" d="M{x1},{y1} C{middle},{y1} {middle},{y2} {x2 - 5},{y2}"/>'
    head = f'<path class="arrow" d="M{x2},{y2} l-6,-3.5 v7 z"/>'
    text = f'<text class="tick" x="{middle}" y="{y1 - 6}" text-anchor="middle">{escape(label)}</text>' if label else ""
    return path + head + text
