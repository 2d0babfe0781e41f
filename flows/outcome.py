"""What a flow hands back."""

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
