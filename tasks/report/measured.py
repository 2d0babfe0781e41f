"""What the phases measured, read from their evidence folders."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tasks.evaluate import evidence


@dataclass
class Measured:
    """Tables of all phases; what no phase wrote is empty.

    evidence: `tasks/evaluate/evidence.py`; steps: one row an RL step; timeline: what the workers of RL did when;
    rollouts: a sample of them; curve: one row a step of the drafter's training.
    """

    evidence: pd.DataFrame = field(default_factory=lambda: evidence.table([], engine="", hardware="", command=""))
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)
    timeline: pd.DataFrame = field(default_factory=pd.DataFrame)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    curve: pd.DataFrame = field(default_factory=pd.DataFrame)


def read(folders: Iterable[Path]) -> Measured:
    """`evidence.parquet`, `steps.parquet`, `timeline.parquet`, `rollouts.jsonl` and `curve.parquet` where present."""
    found, tables = Measured(), []
    for folder in folders:
        if (path := folder / "evidence.parquet").is_file():
            tables.append(evidence.read(path))
        if (path := folder / "steps.parquet").is_file():
            found.steps = pd.read_parquet(path)
        if (path := folder / "timeline.parquet").is_file():
            found.timeline = pd.read_parquet(path)
        if (path := folder / "curve.parquet").is_file():
            found.curve = pd.read_parquet(path)
        if (path := folder / "rollouts.jsonl").is_file():
            found.rollouts += [json.loads(line) for line in path.read_text().splitlines() if line]
    if tables:
        found.evidence = evidence.concat(tables)
    return found
