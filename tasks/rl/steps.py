"""The steps of the RL flow. Arguments and results are JSON, so that a finished step is not done again."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config.flows import RLFlowConfig
from infra.config.target import TargetConfig
from infra.lineage.lineage import Lineage
from infra.lineage.runs import Run
from infra.lineage.source import base_version
from infra.lineage.versions import Version
from infra.services import runs
from infra.services.behind import Behind
from infra.services.prefect import durable
from infra.services.progress import report
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence, questions
from tasks.rl import evidence as figures
from tasks.rl import operation
from tasks.rl.result import ROLLOUTS, STEPS, TIMELINE, RLResult
from tasks.rl.run import train_policy
from tasks.rl.speculating import Proposing

if TYPE_CHECKING:
    import pandas as pd

COMMAND = "lockstep rl"
TABLE = "evidence.parquet"


@durable(name="choose the base version", outlives_edits=True)
def choose_base(config: TargetConfig, run: str) -> Version:
    """The version that training starts from. Kept with the run: aliases may have moved when it resumes."""
    report(f"looking up {config.name} {config.base_version}")
    return base_version(Lineage(), open_store(), config)


@durable(name="train the policy", pools=["engines", "trainer"])
def train(
    base: ArtifactRef, config: RLFlowConfig, run: str, mlflow_run_id: str, drafter: Proposing | None = None
) -> RLResult:
    """`train_policy` from the model `base` in the run's own folder, with `drafter` in the rollouts. Each step's figures
    go to MLflow as it ends, beside the next one."""
    lineage = Lineage()
    tracking = Run(lineage.client, lineage.uri, lineage.experiment, mlflow_run_id)
    with Behind() as behind:
        result = train_policy(
            open_store().open(base),
            config,
            _workdir(run),
            on_step=lambda step, figures: behind(tracking.log_metrics, figures, step=step),
            drafter=drafter and drafter.speculation(),
        )
    if result.resumes:
        tracking.set_tags({"resumed_under_other_pins": " | ".join(result.resumes)})
    return result


@durable(name="keep the trained target")
def keep_target(result: RLResult, base: ArtifactRef, run: str) -> ArtifactRef:
    """The trained model in the store. Its checkpoints, of no more use, are deleted."""
    kept = open_store().put(result.model, "target", producer=f"{COMMAND} {run}", inputs=[base])
    shutil.rmtree(_workdir(run) / "checkpoints", ignore_errors=True)
    return kept


@durable(name="write the evidence of training")
def write_evidence(result: RLResult, target: Version, config: RLFlowConfig) -> ArtifactRef:
    """Evidence table, step table and rollouts of the run that trained `target`, in the store."""
    store, steps = open_store(), figures.read_steps(result.tables / STEPS)
    rows = figures.rows(
        result.held_out,
        result.general_before,
        result.general_after,
        steps,
        subject=target.subject,
        seed=config.rl.seed,
        questions_digest=result.general_digest,
    )
    rows += operation.rows(steps, subject=target.subject, transport=config.rl.transport, placement=result.placement)
    with tempfile.TemporaryDirectory() as folder:
        table = evidence.table(rows, engine=result.engine, hardware=result.hardware, command=COMMAND)
        evidence.write(table, Path(folder) / TABLE)
        questions.keep(result.general_after, Path(folder), config.engine.dtype)
        for name in (STEPS, ROLLOUTS, TIMELINE):
            shutil.copyfile(result.tables / name, Path(folder) / name)
        return store.put(Path(folder), "evidence", producer=COMMAND, inputs=[target.artifact])


def read_evidence(artifact: ArtifactRef) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """The evidence table and the step table that `write_evidence` wrote."""
    folder = open_store().open(artifact)
    return evidence.read(folder / TABLE), figures.read_steps(folder / STEPS)


def _workdir(run: str) -> Path:
    folder = runs.read(run).folder / "rl"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
