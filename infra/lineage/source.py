"""Which version of the target a run starts from."""

from infra.config.target import TargetConfig
from infra.lineage.lineage import Lineage
from infra.lineage.versions import LineageError, Version
from infra.store import models
from infra.store.base import Store


def base_version(lineage: Lineage, store: Store, target: TargetConfig) -> Version:
    """The version that `target.base_version` names; `target.source` becomes version 1 when there is no version yet.

    Raises LineageError when the version does not exist, ModelError when the source is not a model.
    """
    found = lineage.resolve(target.name, target.base_version)
    if found is None and target.base_version == "champion":
        found = lineage.resolve(target.name, "latest")
    if found is not None:
        return found
    if target.base_version not in ("champion", "latest"):
        raise LineageError(
            f"target.base_version={target.base_version}: {target.name} has no such version in MLflow at {lineage.uri}; "
            f"`lockstep lineage` lists what there is"
        )
    artifact = store.put(models.resolve(target.source), "target", producer=f"source {target.source}")
    return lineage.register_target(target.name, artifact, run_id="", tags={"lockstep.source": target.source})
