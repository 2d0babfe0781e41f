"""`lockstep doctor`: each fault is named, with what to do."""

import os
from pathlib import Path

import pytest

from flows.cli import doctor


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LOCKSTEP_STORE", raising=False)
    return tmp_path / "home"


def found() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine()}


def program(folder: Path, name: str, says: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    path.chmod(0o755)


def test_every_fault_has_a_cure_and_a_well_machine_none(home):
    findings = found()
    assert set(findings) >= {"python", "packages", "engine", "memory", "disk", "shared memory", "ports", "store"}
    assert findings["python"].well and findings["packages"].well and findings["store"].well
    assert findings["store"].state == f"{(home / 'artifacts').as_uri()} can be written"
    assert all(finding.cure for finding in findings.values() if not finding.well)
    assert findings["services"].cure == "run `lockstep up`"


def test_a_store_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_STORE", str(tmp_path / "file/below"))
    store = found()["store"]
    assert not store.well and "cannot be written (Not a directory)" in store.state and "LOCKSTEP_STORE" in store.cure


def test_a_containers_limit_counts_as_memory(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**30}\n")
    monkeypatch.setattr(doctor, "CONTROL_GROUP", tmp_path)
    memory = found()["memory"]
    assert not memory.well and memory.state == "3.0 GiB left of this container's 4.0"


def test_gpus_that_the_install_does_not_use_or_that_others_fill(tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", "NVIDIA H200, 143771, 100000, 580.1\\nNVIDIA H200, 143771, 0, 580.1\\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    findings = found()
    if not doctor.accelerated():
        assert not findings["GPUs"].well and "VARIANT=gpu" in findings["GPUs"].cure
        monkeypatch.setattr(doctor, "accelerated", lambda: True)
        findings = {finding.what: finding for finding in doctor._gpus()}
    assert not findings["GPU 0"].well and findings["GPU 0"].state.startswith("NVIDIA H200, 43 of 140 GiB free")
    assert findings["GPU 1"].well


def test_a_home_that_cannot_be_made_is_told(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_HOME", "/proc/lockstep")
    findings = found()
    assert not findings["disk"].well and "LOCKSTEP_HOME" in findings["disk"].cure
    assert not findings["store"].well
