"""The lineage of a target as one page that needs nothing but itself."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from infra.lineage.check import Problem
from infra.lineage.tree import Tree, data, made_with
from infra.lineage.versions import ADOPTED, Version
from infra.store.base import Store, StoreError
from tasks.report.build import FILTERS, TEMPLATES
from tasks.report.measured import read
from tasks.report.plots.svg import number
from tasks.report.plots.versions import anchor, picture


@dataclass(frozen=True)
class Card:
    """What the page says of one version."""

    version: Version
    anchor: str
    words: str
    aliases: list[str]
    faults: list[str]
    facts: dict[str, str]
    config: str
    evidence: list[dict[str, Any]] = field(default_factory=list)


def measurements(store: Store, tree: Tree) -> dict[str, pd.DataFrame]:
    """The evidence of each version by label; empty where there is none or it cannot be read."""
    found = {}
    for version in (v for node in tree.targets for v in node.versions):
        folders = []
        for ref in version.evidence:
            try:
                folders.append(store.open(ref))
            except StoreError:
                continue  # `--check` says what is wrong with it
        table = read(folders).evidence
        found[version.label] = table[table["subject"] == version.subject] if version.kind != "release" else table
    return found


def build(
    file: Path, tree: Tree, measured: Mapping[str, pd.DataFrame], problems: Sequence[Problem] | None = None
) -> Path:
    """Write the page and return its path.

    measured: evidence by label. problems: what `infra/lineage/check.py` found; None when it was not asked.
    """
    from jinja2 import Environment, FileSystemLoader

    faults: dict[str, list[str]] = {}
    for problem in problems or ():
        faults.setdefault(problem.version, []).append(problem.what)
    words = {v.label: headline(v, measured[v.label]) for node in tree.targets for v in node.versions}
    cards = [
        [_card(v, tree, words[v.label], faults.get(v.label, []), measured[v.label]) for v in node.versions]
        for node in reversed(tree.targets)
    ]
    shown = {v.label for node in tree.targets for v in node.versions}
    context = {
        "tree": tree,
        "count": len(shown),
        "figure": picture(tree, lambda v: words[v.label], faults),
        "rows": cards,
        "checked": problems is not None,
        "problems": list(problems or ()),
        "anchors": {card.version.label: card.anchor for row in cards for card in row},
        "style": (TEMPLATES / "style.css").read_text(),
    }
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= FILTERS
    page = environment.get_template("lineage.html.j2").render(context)
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(page)
    os.replace(scratch, file)
    return file


def headline(version: Version, evidence: pd.DataFrame) -> str:
    """What was measured of a version, in a few words."""
    if version.kind == "release":
        parts = [kind for kind in ("drafter", "quant") if kind in version.parts]
        return f"target with {' and '.join(parts)}" if parts else "target alone"
    if version.kind == "target":
        told = [_told(evidence, "reward_difference", "reward change"), _told(evidence, "mismatch_k3_max", "k3")]
    elif version.kind == "drafter":
        told = [
            _told(evidence, "acceptance_length", "acceptance"),
            _told(evidence, "speculation_speedup", "speedup"),
        ]
    else:
        told = [version.tags.get("lockstep.scheme", ""), _told(evidence, "quant_kl", "KL")]
    if any(told):
        return ", ".join(text for text in told if text)
    if source := version.tags.get("lockstep.source"):
        return f"from {source}"
    return "adopted, not measured" if version.unproven else "not measured"


def _told(evidence: pd.DataFrame, figure: str, words: str) -> str:
    """The figure over all domains, else the lowest of those measured."""
    rows = evidence[evidence["figure"] == figure]
    if not len(rows):
        return ""
    overall = rows[rows["domain"].isin(["all", ""])]
    if len(overall):
        return f"{words} {number(overall['value'].iloc[-1])}"
    return f"{words} {number(rows['value'].min())}" + (" at worst" if len(rows) > 1 else "")


def _card(version: Version, tree: Tree, words: str, faults: list[str], evidence: pd.DataFrame) -> Card:
    how = made_with(version)
    facts = {
        "made": f"{version.created:%Y-%m-%d %H:%M} UTC",
        "from": version.parent or version.tags.get("lockstep.source") or version.tags.get(ADOPTED, ""),
        "serves" if version.kind == "release" else "target": ", ".join(version.parts.values()),
        "named by": ", ".join(version.links),
        "artifact": f"{version.artifact.name}, {version.artifact.bytes:,} bytes, {version.artifact.digest}",
        "data": ", ".join(f"{ref.name}, {ref.bytes:,} bytes, {ref.digest}" for ref in data(version)),
        "evidence": ", ".join(f"{ref.name}, {ref.digest}" for ref in version.evidence),
        "left out": version.tags.get("lockstep.left_out", ""),
        "refused": version.tags.get("lockstep.refused", ""),
        "engine": how.get("engine", ""),
        "code": how.get("git", ""),
        "libraries": ", ".join(f"{k} {v}" for k, v in json.loads(version.tags.get("lockstep.libraries", "{}")).items()),
        "configuration": how.get("config_digest", ""),
        "MLflow run": version.run_id,
    }
    config = version.tags.get("lockstep.config", "")
    return Card(
        version=version,
        anchor=anchor(version),
        words=words,
        aliases=tree.held(version),
        faults=faults,
        facts={name: text for name, text in facts.items() if text},
        config=json.dumps(json.loads(config), indent=1) if config else "",
        evidence=evidence.to_dict("records"),
    )
