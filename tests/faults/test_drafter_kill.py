"""A drafter's trainer that is killed costs the step another attempt, not the run."""

import time
from contextlib import suppress

import psutil

from infra.cluster.session import session
from infra.config.flows import DrafterFlowConfig
from infra.config.load import load
from tasks.drafter.remote import RemoteWorker


def started(but: int = 0) -> psutil.Process:
    """The trainer that this process started, importing what it needs or done with that. but: the id of a process that
    it is not."""
    deadline = time.monotonic() + 600
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.pid != but and " ".join(process.cmdline()).startswith("ray::TrainerWorker"):
                    return process
        assert time.monotonic() < deadline, "there is no trainer"
        time.sleep(0.1)


def test_a_step_that_is_tried_again_finds_another_trainer_with_the_devices_of_the_dead_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    cpus = int(session().resources().cpus)
    config = load(DrafterFlowConfig, preset="tiny", overrides=[f"cluster.trainer_threads={cpus}"])
    trainer = RemoteWorker(config)
    first = started()
    first.kill()
    first.wait(600)
    trainer.look_after()
    assert started(but=first.pid).pid != first.pid
