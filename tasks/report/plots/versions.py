"""All versions of a target as one picture: a row for each target version, the newest on top."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from infra.lineage.tree import Node, Tree
from infra.lineage.versions import Version
from tasks.report.plots.figure import Figure

BOX_W, BOX_H, GAP_Y, ROW_GAP = 262, 62, 12, 34
MARGIN = 30  # for lines from a target to one that is not in the row below
COLUMNS = (MARGIN, MARGIN + BOX_W + 70, MARGIN + 2 * (BOX_W + 70))
WIDTH = COLUMNS[2] + BOX_W + 6
LINE = 16
FITS = 36  # characters of 12 px text in a box

Place = dict[str, tuple[float, float]]


def anchor(version: Version) -> str:
    """HTML id of what the page says about a version."""
    return version.label.replace("/", "-")


def picture(tree: Tree, words: Callable[[Version], str], faulty: Mapping[str, Sequence[str]]) -> Figure:
    """Target -> its drafters and quants -> its releases; what the champion serves is drawn strong.

    words: the key figure of a version in a few words. faulty: what is wrong with a version, by label.
    """
    rows = list(reversed(tree.targets))
    places, height = _places(rows)
    champion = next((r for node in rows for r in node.releases if "champion" in tree.held(r)), None)
    strong = {champion.label, *champion.parts.values()} if champion else set()
    marks = [mark for node in rows for mark in _edges(node, places, strong)]
    for node in rows:
        for version in node.versions:
            marks.append(
                _box(version, places[version.label], words(version), tree.held(version), version.label in strong,
                     faulty.get(version.label, ()))
            )  # fmt: skip
    svg = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="Lineage of {escape(tree.name)}">'
    legend = [("c3", "served by the champion")] if champion else []
    if any(version.unproven for node in rows for version in node.versions):
        legend.append(("c0", "dashed: adopted, not measured"))
    if faulty:
        legend.append(("bad", "something is wrong with it"))
    caption = "Newest on top. A line up: trained from. Each box leads to what is known of that version."
    return Figure("versions", "Versions and what was made of them", f"{svg}{''.join(marks)}</svg>", caption, legend)


def _places(rows: Sequence[Node]) -> tuple[Place, float]:
    """Upper left corner of each box, and the height of all; a row is as high as its longest column."""
    places: Place = {}
    top = 8.0
    for node in rows:
        columns = [[node.version], [*node.drafters, *node.quants], node.releases]
        longest = max(map(len, columns))
        height = longest * (BOX_H + GAP_Y) - GAP_Y
        for x, column in zip(COLUMNS, columns, strict=True):
            taken = len(column) * (BOX_H + GAP_Y) - GAP_Y
            for i, version in enumerate(column):
                places[version.label] = (x, top + (height - taken) / 2 + i * (BOX_H + GAP_Y))
        top += height + ROW_GAP
    return places, top - ROW_GAP + 8


def _edges(node: Node, places: Place, strong: set[str]) -> list[str]:
    target = node.version
    made = [(target.label, v.label) for v in (*node.drafters, *node.quants)]
    for release in node.releases:
        parts = [label for kind, label in release.parts.items() if kind != "target"] or [target.label]
        made += [(part, release.label) for part in parts]
    found = [
        _across(places[start], places[end], start in strong and end in strong)
        for start, end in made
        if start in places and end in places
    ]
    if target.parent in places:
        found.append(_up(places[target.parent], places[target.label]))
    return found


def _across(start: tuple[float, float], end: tuple[float, float], strong: bool) -> str:
    (x1, y1), (x2, y2) = (start[0] + BOX_W, start[1] + BOX_H / 2), (end[0], end[1] + BOX_H / 2)
    bend = min(40.0, (x2 - x1) / 2)
    path = f"M{x1:.0f},{y1:.0f} C{x1 + bend:.0f},{y1:.0f} {x2 - bend:.0f},{y2:.0f} {x2 - 6:.0f},{y2:.0f}"
    return _arrow(path, f"M{x2:.0f},{y2:.0f} l-7,-4 v8 z", strong)


def _up(parent: tuple[float, float], child: tuple[float, float]) -> str:
    """From the parent below to its child: straight in the column, around the versions between them at its side."""
    if child[1] + BOX_H + ROW_GAP + BOX_H > parent[1]:
        x, y1, y2 = parent[0] + 40, parent[1], child[1] + BOX_H
        return _arrow(f"M{x:.0f},{y1:.0f} V{y2 + 6:.0f}", f"M{x:.0f},{y2:.0f} l-4,7 h8 z", False)
    x, y1, y2 = parent[0], parent[1] + BOX_H / 2, child[1] + BOX_H / 2
    path = f"M{x:.0f},{y1:.0f} C{x - MARGIN:.0f},{y1:.0f} {x - MARGIN:.0f},{y2:.0f} {x - 6:.0f},{y2:.0f}"
    return _arrow(path, f"M{x:.0f},{y2:.0f} l-7,-4 v8 z", False)


def _arrow(path: str, head: str, strong: bool) -> str:
    cls = " champion" if strong else ""
    return f'<path class="edge{cls}" d="{path}"/><path class="arrow{cls}" d="{head}"/>'


def _box(
    version: Version,
    place: tuple[float, float],
    words: str,
    aliases: Sequence[str],
    strong: bool,
    faults: Sequence[str],
) -> str:
    x, y = place
    cls = "box" + (" champion" if strong else "") + (" dashed" if version.unproven else "")
    cls += " faulty" if faults else ""
    size = version.artifact.bytes / 2**20
    about = f"{version.created:%Y-%m-%d %H:%M}" + (f" · {size:,.1f} MiB" if size >= 0.1 else "")
    tip = "\n".join([version.label, version.artifact.digest, *faults])
    lines = [("strong", version.label), ("tick", about), ("", ("✗ " + faults[0]) if faults else words)]
    texts = "".join(
        f'<text class="{cls}" x="{x + 12:.0f}" y="{y + 20 + LINE * i:.0f}">{escape(_fit(line))}</text>'
        for i, (cls, line) in enumerate(lines)
    )
    named = (
        f'<text class="alias" x="{x + BOX_W - 12:.0f}" y="{y + 20:.0f}" text-anchor="end">{", ".join(aliases)}</text>'
    )
    return (
        f'<a href="#{anchor(version)}"><title>{escape(tip)}</title>'
        f'<rect class="{cls}" x="{x:.0f}" y="{y:.0f}" width="{BOX_W}" height="{BOX_H}" rx="7"/>'
        f"{texts}{named if aliases else ''}</a>"
    )


def _fit(line: str) -> str:
    return line if len(line) <= FITS else line[: FITS - 1] + "…"
