"""Measure: one part of the loop, on this machine, with its figures kept as evidence."""

import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from infra.config.base import Section
from infra.config.flows import FlowConfig
from tasks.evaluate.measurement import Measurement

# What can be measured: the module that measures it. Its `MEASUREMENT` is a `tasks.evaluate.measurement.Measurement`.
MEASUREMENTS = {
    "quants": "tasks.quant.table",
    "transport": "tasks.measure.transport",
    "sleep": "tasks.measure.sleep",
    "delta": "tasks.rl.measure_delta",
    "store": "tasks.measure.store",
    "rollout": "tasks.rl.measure",
    "asynchrony": "tasks.rl.measure_asynchrony",
    "trainer": "tasks.rl.measure_trainer",
    "numerics": "tasks.rl.measure_numerics",
    "drafter": "tasks.drafter.measure",
    "drift": "tasks.drafter.measure_drift",
}


class MeasureOutcome(BaseModel):
    """What a measurement came to.

    table, findings: as in `tasks.evaluate.measurement.Measured`.
    page: a page with the table and the charts; evidence.parquet lies beside it.
    url: address of the MLflow run, empty when MLflow is a file.
    """

    model_config = ConfigDict(frozen=True)

    what: str
    findings: list[str]
    table: list[dict[str, Any]]
    page: Path
    mlflow_run_id: str
    url: str


def measurement(what: str) -> Measurement:
    """The measurement of that name."""
    return import_module(MEASUREMENTS[what]).MEASUREMENT


def measure(
    what: str, config: FlowConfig, options: Section, *, command: str, say: Callable[[str], None]
) -> MeasureOutcome:
    """Measure, write page, table and evidence under `home()/measured`, and attach them to an MLflow run.

    It runs in the caller's process and needs no services: whatever else runs here would be in the figures.
    command: as the evidence names its origin. say: takes lines about what is being done.
    Raises MeasureError when it cannot be measured here.
    """
    from infra.engine.pin import engine_pin, hardware
    from infra.lineage.lineage import Lineage
    from infra.lineage.runs import MEASURED
    from infra.services.home import home
    from tasks.evaluate import evidence
    from tasks.report.measurement import write_page

    measured = measurement(what).measure(config, options, say)
    key = f"measure-{what}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = home() / "measured" / key
    table = evidence.table(measured.rows, engine=engine_pin(), hardware=hardware(), command=command)
    page = write_page(folder, what, measured, table)
    evidence.write(table, folder / "evidence.parquet")
    with Lineage().run(key, "measure", model=config.target.name, tags={MEASURED: what}) as mlflow_run:
        mlflow_run.log_params({"command": command} | options.model_dump(mode="json"))
        mlflow_run.log_metrics(evidence.metrics(table))
        mlflow_run.log_file(folder)
    return MeasureOutcome(
        what=what,
        findings=measured.findings,
        table=measured.table,
        page=page,
        mlflow_run_id=mlflow_run.id,
        url=mlflow_run.url,
    )
