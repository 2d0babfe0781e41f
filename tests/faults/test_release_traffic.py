"""Clients of the stable address through release, rollback and the death of a replica."""

import os
import signal

import psutil
import pytest
from served import GATES, api_server, model, release, serving, settings
from traffic import Load

from infra.config.gates import Gate
from infra.lineage.aliases import aliases
from infra.lineage.check import check
from infra.services import local, supervise
from infra.serving.client import running
from infra.serving.state import State, Wish
from infra.store.open import open_store
from tasks.release import takeover
from tasks.release.triple import Serving


@pytest.fixture(scope="module")
def config(tiny_llama):
    return settings(tiny_llama)


@pytest.fixture(scope="module")
def house(tmp_path_factory, config, book):
    """Lineage and fleet of a target that is served, and of nothing else."""
    home = tmp_path_factory.mktemp("home")
    book(home / "mlflow.db")
    with serving(home, config) as there:
        yield there


def test_clients_see_nothing_of_releases_rollbacks_and_dying_replicas(house, config, tiny_llama, tmp_path):
    lineage, fleet = house
    one = model(tiny_llama, tmp_path / "one", lineage, None)
    first, tried = release(one, config)
    assert tried.judgement.verdicts == [] and aliases(lineage, "served") == {"champion": first.label}

    two = model(tiny_llama, tmp_path / "two", lineage, one)
    with Load(fleet.address, "served", concurrency=4) as load:
        load.wait_for(20)
        second, tried = release(two, config)
        assert {(v.name, v.domain, v.verdict) for v in tried.judgement.verdicts} == {
            ("answered", "30%", "pass"),
            ("golden", "30%", "pass"),
        }
        assert aliases(lineage, "served") == {"champion": second.label, "previous": first.label}
        load.wait_for(20)
        assert set(load.answered) == {one.label, two.label}

        by_then = load.answered[one.label]
        now, before = takeover.go_back("served", Serving.of(config), print)
        assert (now.label, before.label) == (first.label, second.label)
        assert aliases(lineage, "served") == {"champion": first.label}
        load.wait_for(20)
        assert load.answered[one.label] > by_then
        assert (load.failed, load.cut) == ([], 0)

        for state in fleet.states():
            if list(state.pools) == [state.stable]:
                break  # what is found now serves, and is not about to be stopped
        victim = api_server(fleet)
        os.kill(victim.pid, signal.SIGKILL)
        load.wait_for(60)
    assert load.failed == []
    for state in fleet.states():
        pool = state.pools[state.stable]
        if pool.restarts and pool.ready == 2 and state.cut >= load.cut:
            break
    assert (state.cut, state.failed) == (load.cut, 0)
    assert list(state.pools) == [state.stable]
    assert check(lineage, open_store(), "served") == []


def test_a_release_that_fails_its_requests_is_taken_back(house, config, tiny_llama, tmp_path):
    lineage, fleet = house
    champion = aliases(lineage, "served")["champion"]
    strict = Gate(name="impossible", part="live", figure="live_error_share", comparison="<", bound=0.0)
    three = model(tiny_llama, tmp_path / "three", lineage, None)
    settings = config.release.model_copy(update={"gates": [*GATES[:1], strict]})
    refused, tried = release(three, config.model_copy(update={"release": settings}))
    assert "live_error_share on 30% is 0" in tried.judgement.decision.refusal
    assert "live_error_share" in lineage.get(refused.label).tags["lockstep.refused"]
    assert aliases(lineage, "served") == {"champion": champion}
    for state in fleet.states():
        if len(state.pools) == 1:
            break
    assert state.pools[state.stable].label == lineage.get(champion).parts["target"]


def test_the_fleet_comes_back_with_what_it_served(house, config):
    record, before = local.serve(print, Wish.read()), State.read()
    os.kill(record.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(record.pid)], timeout=600)
    assert not supervise.alive(record) and running("served") is None
    again = local.serve(print, Wish.read())
    assert again.address == record.address
    for state in running("served").states():
        if state.stable:
            break
    assert state.stable == before.stable and state.pid != before.pid
    with Load(again.address, "served", concurrency=1) as load:
        load.wait_for(2)
    assert load.failed == []
