"""Evidence as tables that people read: rows for Prefect, and lines of Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

Sentence = tuple[str, str, str]
"""A figure, what it says, and the format in which its value reads."""


def rows(evidence: "pd.DataFrame", sentences: Sequence[Sentence]) -> list[dict[str, str]]:
    """One row for each measurement of a figure that `sentences` names, in their order. n is the sample size."""
    found = []
    for figure, sentence, form in sentences:
        for measured in evidence[evidence["figure"] == figure].itertuples():
            ends = "" if math.isnan(measured.low) else f"{form.format(measured.low)} to {form.format(measured.high)}"
            cells = (sentence, measured.domain, form.format(measured.value), ends, f"{measured.n:,}")
            found.append(dict(zip(("figure", "domain", "value", "95% interval", "n"), cells, strict=True)))
    return found


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of Markdown; the first row names the columns, and a `|` in a cell stays one. Nothing for no rows."""
    if not rows:
        return []
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
