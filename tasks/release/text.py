"""Verdicts and decisions for people: rows of a table, and a page of Markdown."""

from collections.abc import Mapping, Sequence

from infra.lineage.versions import Version
from tasks.evaluate.page import table
from tasks.release.answers import Answer
from tasks.release.decision import Decision
from tasks.release.gates import Verdict

COLUMNS = 7  # of `rows` that fit beside each other on a page
MARK = {"pass": "pass", "fail": "**fail**", "undecided": "undecided"}


def rows(verdicts: Sequence[Verdict]) -> list[dict[str, str | int]]:
    """One row a verdict, for a table artifact. What is read first comes first: Prefect cuts wide tables off."""
    return [
        {
            "verdict": v.verdict,
            "gate": v.name,
            "domain": v.domain,
            "value": _number(v.value),
            "95% interval": f"{_number(v.low)} to {_number(v.high)}" if v.low is not None else "",
            "bound": f"{v.side + ' ' if v.side != 'value' else ''}{v.comparison} {v.bound:g}",
            "n": v.n,
            "part": v.part,
            "figure": v.figure,
        }
        for v in verdicts
    ]


def markdown(title: str, decision: Decision, verdicts: Sequence[Verdict], answers: Sequence[Answer]) -> str:
    """The release on one page: what was decided and why, the verdicts, and what the engine answered."""
    lines = [f"# {title}", ""]
    lines += [f"- {reason}" for reason in decision.reasons] or ["- every part is released"]
    lines += [f"- warning: {warning}" for warning in decision.warnings]
    shown = [{column: row[column] for column in list(row)[:COLUMNS]} for row in rows(verdicts)]
    lines += ["", *table([row | {"verdict": MARK[row["verdict"]]} for row in shown])]
    if answers:
        lines += ["", "## Asked over HTTP", ""]
        for answer in answers:
            lines += [f"**{answer.question}**", "", *(f"> {line}" for line in answer.answer.splitlines()), ""]
    return "\n".join(lines)


def question(
    versions: Sequence[Version], decision: Decision, verdicts: Sequence[Verdict], links: Mapping[str, str]
) -> str:
    """What a person is asked before a promotion, narrow enough for the form in Prefect: figures beside their bounds,
    and where to read more. links: addresses by text; those that are empty are left out."""
    lines = [f"### Release {', '.join(v.label for v in versions)}?", ""]
    lines += [f"- {line}" for line in [*decision.reasons, *decision.warnings]] or ["Every gate lets every part pass."]
    lines += ["", "| figure | value | must be |", "|---|---|---|"]
    for v in verdicts:
        figure = v.figure.replace("_", " ") + (f", {v.domain}" if v.domain else "")
        if v.verdict != "pass":
            figure = f"{MARK[v.verdict]}: {figure}"
        lines.append(f"| {figure} | {_number(v.value) or 'not measured'} (n={v.n}) | {v.comparison} {v.bound:g} |")
    lines += ["", " · ".join(f"[{text}]({address})" for text, address in links.items() if address)]
    return "\n".join(lines)


def terminal(decision: Decision, verdicts: Sequence[Verdict]) -> str:
    """One line a verdict, then what they allow."""
    said = [
        (
            v.verdict + (" (waived)" if v.waived else ""),
            v.part,
            v.name + (f" ({v.domain})" if v.domain else ""),
            f"{_number(v.value) or 'not measured'}, must be {v.comparison} {v.bound:g}, n={v.n}",
        )
        for v in verdicts
    ]
    widths = [max((len(row[i]) for row in said), default=0) for i in range(3)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in said]
    return "\n".join([*lines, *(f"- {line}" for line in [*decision.reasons, *decision.warnings])])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
