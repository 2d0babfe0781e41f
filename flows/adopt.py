"""Adopt: a model, drafter or quant that was made elsewhere becomes a version, unproven until it is measured."""

import tempfile
from pathlib import Path

from infra.lineage.announce import REGISTERED, announce
from infra.lineage.lineage import Lineage, Version
from infra.lineage.versions import ADOPTED, LineageError
from infra.store import models
from infra.store.open import open_store

PRODUCER = "lockstep register"


def adopt_target(name: str, folder: Path) -> Version:
    """A new version of the target `name` from the model in `folder`; what follows a new target follows this one.

    Raises ModelError when it is not a model.
    """
    lineage = Lineage()
    artifact = open_store().put(models.check(folder), "target", producer=PRODUCER)
    version = lineage.register_target(name, artifact, run_id="", tags=_from(folder))
    announce(lineage, REGISTERED, version, by="register")
    return version


def adopt_drafter(name: str, folder: Path, target: str) -> Version:
    """A drafter of the target version with the label `target`, linked both ways.

    Raises LineageError without that version, ModelError or ContractError when it cannot serve it.
    """
    from tasks.drafter.adopt import adopt

    lineage, store = Lineage(), open_store()
    of = _target(lineage, name, target)
    with tempfile.TemporaryDirectory() as scratch:
        kind = adopt(folder, store.open(of.artifact), Path(scratch))
        artifact = store.put(Path(scratch), "drafter", producer=PRODUCER, inputs=[of.artifact])
    tags = _from(folder) | {"lockstep.drafter_kind": kind}
    return lineage.register_drafter(name, artifact, target=of, run_id="", tags=tags)


def adopt_quant(name: str, folder: Path, target: str) -> Version:
    """A quantized copy of the target version with the label `target`, linked both ways.

    Raises LineageError without that version, ModelError or SchemeError when it is no copy of it.
    """
    from tasks.quant.adopt import check

    lineage, store = Lineage(), open_store()
    of = _target(lineage, name, target)
    scheme = check(folder, store.open(of.artifact))
    artifact = store.put(folder, "quant", producer=PRODUCER, inputs=[of.artifact])
    return lineage.register_quant(
        name, artifact, target=of, run_id="", tags=_from(folder) | {"lockstep.scheme": scheme}
    )


def _target(lineage: Lineage, name: str, label: str) -> Version:
    version = lineage.get(label)
    if version.model != name:
        raise LineageError(f"--target {label}: that is not a version of the target {name}; `lockstep lineage {name}`")
    return version


def _from(folder: Path) -> dict[str, str]:
    return {ADOPTED: str(folder.absolute())}
