"""Versions to try the lineage on: each with an artifact of its own, measured or not."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.store.local import LocalStore
from infra.store.refs import ArtifactRef


class Maker:
    """Registers versions of one target with artifacts of their own."""

    def __init__(self, lineage: Lineage, store: LocalStore, name: str, folder: Path):
        self.lineage, self.store, self.name, self.folder = lineage, store, name, folder
        self.made = 0

    def artifact(self, kind: str, table: pd.DataFrame | None = None, inputs: Sequence[ArtifactRef] = ()) -> ArtifactRef:
        self.made += 1
        folder = self.folder / str(self.made)
        folder.mkdir()
        if table is None:
            (folder / "weights").write_text(f"{self.name} {kind} {self.made}")
        else:
            table.to_parquet(folder / "evidence.parquet")
        return self.store.put(folder, kind, producer="a test", inputs=inputs)

    def measured(self, version: Version, target: Version | None = None) -> Version:
        """With evidence of a measurement of it, on `target`."""
        table = pd.DataFrame({"figure": ["f"], "subject": [version.subject], "value": [float(self.made)]})
        inputs = [version.artifact, *([target.artifact] if target else [])]
        return self.lineage.attach_evidence(version, self.artifact("evidence", table, inputs))

    def target(self, parent: Version | None = None) -> Version:
        return self.measured(self.lineage.register_target(self.name, self.artifact("target"), parent=parent, run_id=""))

    def drafter(self, target: Version) -> Version:
        drafter = self.lineage.register_drafter(self.name, self.artifact("drafter"), target=target, run_id="")
        return self.measured(drafter, target)

    def quant(self, target: Version) -> Version:
        quant = self.lineage.register_quant(self.name, self.artifact("quant"), target=target, run_id="")
        return self.measured(quant, target)

    def release(self, target: Version, drafter: Version | None = None, quant: Version | None = None) -> Version:
        parts = [v for v in (target, drafter, quant) if v]
        table = pd.DataFrame({"figure": ["f"] * len(parts), "subject": [v.subject for v in parts], "value": 1.0})
        record = self.artifact("release", table)
        return self.lineage.register_release(self.name, record, target=target, drafter=drafter, quant=quant, run_id="")
