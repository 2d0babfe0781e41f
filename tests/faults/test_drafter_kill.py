"""A drafter's trainer that is killed costs the step another attempt, not the run."""

import time
from contextlib import suppress

import psutil

from infra.cluster.session import session
from infra.config.flows import DrafterFlowConfig
from infra.config.load import load
from tasks.drafter.remote import RemoteWorker


def warming_up(but: int = 0) -> psutil.Process:
    """The trainer that this process started, once it imports what it needs. but: the id of a process that it is not."""
    deadline = time.monotonic() + 120
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.pid != but and " ".join(process.cmdline()).startswith("ray::TrainerWorker.warm_up"):
                    return process
        assert time.monotonic() < deadline, "there is no trainer"
        time.sleep(0.1)


def test_a_step_that_is_tried_again_finds_another_trainer_with_the_devices_of_the_dead_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    cpus = int(session().resources().cpus)
    config = load(DrafterFlowConfig, preset="tiny", overrides=[f"cluster.trainer_threads={cpus}"])
    trainer = RemoteWorker(config)
    first = warming_up()
    first.kill()
    first.wait(60)
    trainer.look_after()
    assert warming_up(but=first.pid).pid != first.pid
