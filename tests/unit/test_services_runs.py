"""Which run is continued, and which starts anew."""

import multiprocessing
import os
import signal
from datetime import timedelta

import pytest
from pydantic import BaseModel

from infra.config.flows import RLFlowConfig
from infra.services import old_runs, runs
from infra.services.runs import Refused, claim

CONFIG = RLFlowConfig()
OTHER = RLFlowConfig(rl={"lr": 1e-3})


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    return tmp_path


def interrupted(config=CONFIG) -> str:
    with pytest.raises(ZeroDivisionError), claim("rl", config) as key:
        raise ZeroDivisionError
    return key


def test_an_interrupted_run_is_continued_and_a_finished_one_is_not():
    first = interrupted()
    with claim("rl", CONFIG) as second:
        assert second == first
    with claim("rl", CONFIG) as third:
        assert third != first
    assert [r.status for r in runs.every()] == ["finished", "finished"]


def test_another_configuration_or_flow_is_another_run():
    first = interrupted()
    with claim("rl", OTHER) as other, claim("drafter", CONFIG) as drafter:
        assert len({first, other, drafter}) == 3


def test_a_trigger_for_another_version_is_another_run():
    with pytest.raises(ZeroDivisionError), claim("drafter", CONFIG, target="smol/2") as first:
        raise ZeroDivisionError
    with claim("drafter", CONFIG, target="smol/3") as other, claim("drafter", CONFIG) as newest:
        assert len({first, other, newest}) == 3
    with claim("drafter", CONFIG, target="smol/2", quant=None) as again:
        assert again == first


def test_two_live_runs_of_one_configuration_have_two_keys():
    with claim("rl", CONFIG) as first, claim("rl", CONFIG) as second:
        assert first != second
        assert all(runs.live(r) for r in runs.every())
    assert not any(runs.live(r) for r in runs.every())


def test_a_refused_run_is_finished():
    with pytest.raises(Refused), claim("rl", CONFIG) as first:
        raise Refused("reward fell")
    assert runs.read(first).status == "refused"
    with claim("rl", CONFIG) as second:
        assert second != first


def test_a_called_flow_uses_the_run_of_its_caller():
    with claim("rl", CONFIG, "loop-1") as key:
        assert key == "loop-1"
    assert runs.every() == []


def test_an_abandoned_run_is_not_continued():
    first = interrupted()
    assert runs.abandon("rl", OTHER) == []
    assert runs.abandon("rl", CONFIG) == [first]
    with claim("rl", CONFIG) as second:
        assert second != first


def test_the_outcome_is_kept():
    with claim("rl", CONFIG) as key:
        runs.keep_outcome(key, OTHER)
    assert runs.read(key).outcome == OTHER.model_dump(mode="json")


def hold(key_to, gate_from) -> None:
    with claim("rl", CONFIG) as key:
        key_to.send(key)
        gate_from.recv()


def test_the_run_of_a_killed_process_is_continued():
    context = multiprocessing.get_context("fork")
    (key_from, key_to), (gate_from, _gate_to) = context.Pipe(False), context.Pipe(False)
    process = context.Process(target=hold, args=(key_to, gate_from))
    process.start()
    key = key_from.recv()
    assert runs.live(runs.read(key))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with claim("rl", CONFIG) as again:
        assert again == key


def claim_once(barrier, keys) -> None:
    barrier.wait()
    with claim("rl", CONFIG) as key:
        keys.put(key)
        barrier.wait()


def test_many_claimers_at_once_get_a_run_each():
    context = multiprocessing.get_context("fork")
    interrupted()
    barrier, keys = context.Barrier(6), context.Queue()
    processes = [context.Process(target=claim_once, args=(barrier, keys)) for _ in range(6)]
    for process in processes:
        process.start()
    claimed = [keys.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    assert len(set(claimed)) == 6


class Told(BaseModel):
    reward: float


def test_old_runs_are_found_and_deleted_but_none_that_somebody_needs():
    def finished(flow: str = "rl", config=CONFIG, told: bool = False) -> str:
        with claim(flow, config) as key:
            (runs.read(key).folder / "checkpoint").write_text("weights")
            if told:
                runs.keep_outcome(key, Told(reward=0.5))
        return key

    resumable = interrupted(OTHER)
    old, reported, last = finished(), finished(told=True), finished()
    with claim("drafter", CONFIG) as at_work:
        assert old_runs.find(timedelta(days=1)) == []  # all are young
        (found,) = old_runs.find(timedelta(0))
        assert found.key == old and found.ended.startswith("finished 20") and found.bytes > len("weights")
        assert list(old_runs.delete([found])) == [(found, True)]
    assert {run.key for run in runs.every()} == {resumable, reported, last, at_work}
    assert old_runs.find(timedelta(0)) == []
    assert list(old_runs.delete([found])) == [(found, True)]  # another one was faster

    (runs.read(reported).folder / "run.json").unlink()  # where a deletion was interrupted
    (left,) = old_runs.find(timedelta(days=1))
    assert (left.key, left.ended) == (reported, "deleted in part")
    assert list(old_runs.delete([left])) == [(left, True)]
    assert not (runs.folder() / reported).exists()


def test_a_run_that_was_listed_and_is_open_again_keeps_its_folder():
    key = interrupted()
    listed = old_runs.OldRun(key=key, ended="finished", bytes=0)
    assert list(old_runs.delete([listed])) == [(listed, False)]
    with claim("rl", CONFIG) as again:
        assert again == key
