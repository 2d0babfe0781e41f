"""A fleet with a house around it, for tests that release through it: what the flow does, step by step."""

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.config.fleet import FleetConfig
from infra.config.flows import ReleaseFlowConfig
from infra.config.gates import Gate
from infra.config.release import Golden, ReleaseConfig
from infra.config.target import EngineConfig, TargetConfig
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.services import local
from infra.serving.client import Fleet, running
from infra.serving.state import State, Wish
from infra.store.open import open_store
from tasks.evaluate import evidence
from tasks.release import steps, takeover
from tasks.release.candidate import Candidate

GATES = [
    Gate(name="better", part="target", figure="reward_difference", comparison=">=", bound=0.0),
    Gate(name="answered", part="live", figure="live_error_share", comparison="<=", bound=0.0, min_n=4),
    Gate(name="golden", part="live", figure="live_golden_difference", comparison=">=", bound=0.0),
]


def settings(model: Path, **fleet) -> ReleaseFlowConfig:
    """Configuration of a target called `served`."""
    fleet = FleetConfig(**({"replicas": 2, "steps": [30], "probes": 4, "hold_s": 0.5, "drain_s": 60} | fleet))
    return ReleaseFlowConfig(
        target=TargetConfig(name="served", source=str(model)),
        engine=EngineConfig(cpu_threads=1, kv_cache_gib=0.1, max_model_len=512, max_concurrent_sequences=16),
        release=ReleaseConfig(
            gates=GATES,
            fleet=fleet,
            golden=[Golden(question="Who?", expect=""), Golden(question="What?", expect="")],
            questions=["Who are you?"],
            max_new_tokens=8,
        ),
    )


@contextmanager
def serving(home: Path, config: ReleaseFlowConfig) -> Iterator[tuple[Lineage, Fleet]]:
    """A running fleet with nothing released yet; lineage and store are in `home`, for every step and for the fleet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_HOME", str(home))
        patch.delenv("LOCKSTEP_STORE", raising=False)
        patch.delenv("LOCKSTEP_SERVE_KEY", raising=False)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
        local.serve(print, Wish(name="served", config=config.release.fleet))
        try:
            yield Lineage(), running("served")
        finally:
            local.down(print)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or ())]


def model(tiny_llama: Path, folder: Path, lineage: Lineage, parent: Version | None) -> Version:
    """A new version: the same weights, other bytes."""
    folder.mkdir()
    for file in tiny_llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"lockstep_version": folder.name}))
    artifact = open_store().put(folder, "target", producer="a test")
    version = lineage.register_target("served", artifact, parent=parent, run_id="")
    rows = [evidence.row("reward_difference", 0.1, n=10, unit="", subject=version.subject)]
    table = folder.with_name(f"{folder.name}-evidence")
    table.mkdir()
    evidence.write(evidence.table(rows, engine="e", hardware="h", command="a test"), table / "evidence.parquet")
    return lineage.attach_evidence(version, open_store().put(table, "evidence", producer="a test"))


def release(target: Version, config: ReleaseFlowConfig) -> tuple[Version, takeover.Tried]:
    """What the flow does with a candidate, step by step."""
    candidate, run = Candidate(target=target, drafter=None, quant=None), target.label
    table = steps.gather_evidence.fn(candidate, run)
    judgement = steps.judge_by_gates.fn(candidate, table, config.release)
    served = takeover.stage.fn(candidate, config, run)
    record = steps.keep_record.fn(candidate, table, judgement, served)
    version = steps.register(candidate, judgement, record, config, "", None)
    tried = takeover.try_on_share.fn(candidate, version, config, run)
    if takeover.after_trial(judgement.decision, tried).target:
        takeover.make_champion(candidate, version, tried, config)
    else:
        takeover.take_back("served", version, tried)
    return version, tried


def api_server(fleet: Fleet) -> psutil.Process:
    """The server of one of the replicas."""
    addresses = {int(p.stem.rpartition("-")[2]) for p in (Path(os.environ["LOCKSTEP_HOME"]) / "logs").rglob("serve-*")}
    for process in psutil.Process(State.read().pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the fleet's helpers come and go
            ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            if ports & addresses:
                return process
    raise AssertionError(f"no replica listens on any of {addresses}")
