"""What a flow hands back, and what its run is called."""

from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict

from infra.store.refs import ArtifactRef


class Outcome(BaseModel):
    """Result of one phase's flow; each flow adds its own fields.

    run: key of the run it belongs to.
    mlflow_run_id: the phase's MLflow run.
    spans: seconds by kind of work (`infra/services/spans.py`), measured when the work was done.
    evidence: artifact of kind `evidence` with everything the phase measured.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    mlflow_run_id: str
    spans: dict[str, float]
    evidence: ArtifactRef


def run_name() -> str:
    """The name of a run in Prefect: its flow and what it is about, such as `release smol/2`, or `rl smol`."""
    given = flow_run.parameters
    config = given["config"]  # of a submitted run it is JSON, as it was sent
    name = config["target"]["name"] if isinstance(config, dict) else config.target.name
    return f"{flow_run.flow_name} {given.get('target') or name}"
