"""From a registered target to an approved release, by events alone, on a real Prefect server."""

import json
import subprocess
import sys

import pytest
from demo_runs import until, web

SETTINGS = ["--preset", "tiny", "--set", "target.name=alone", "--set", "release.approval=person"]
# what `lockstep register` does with a model that was made elsewhere
REGISTER = """
from infra.lineage.announce import REGISTERED, announce
from infra.lineage.lineage import Lineage
from infra.store.models import resolve
from infra.store.open import open_store

lineage = Lineage()
model = open_store().put(resolve("random:llama"), "target", producer="a test")
target = lineage.register_target("alone", model, run_id="", tags={"lockstep.source": "elsewhere"})
for _ in range(2):  # told once, however often
    announce(lineage, REGISTERED, lineage.get(target.label), by="register")
"""


@pytest.fixture(scope="module")
def automated(services, lockstep):
    """The services, with the triggers at work for a target of this test."""
    told = lockstep("automate", *SETTINGS)
    assert told.returncode == 0, told.stderr
    yield services
    assert lockstep("automate", "--off").returncode == 0


@pytest.mark.timeout(1800)
def test_a_registered_target_becomes_a_release_that_a_person_approved(automated, lockstep, prefect_api):
    done = subprocess.run([sys.executable, "-c", REGISTER], env=automated, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    waiting = until(lambda: _runs(prefect_api, "release", "PAUSED") or _bad(prefect_api), 1200)
    assert [run["state_name"] for run in waiting] == ["Paused"], [run["state"]["message"] for run in waiting]
    word = {"decision": "approve", "name": "Ann", "reason": "acceptance is up"}
    resume = f"{prefect_api}/flow_runs/{waiting[0]['id']}/resume"
    # a run is paused a moment before its form is there, and a person is slower than this
    until(lambda: web.post(resume, json={"run_input": word}).json().get("status") == "ACCEPT")
    unfinished = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED")
    until(lambda: not _runs(prefect_api, "release", *unfinished) or _bad(prefect_api))
    assert not _bad(prefect_api)

    tree = json.loads(lockstep("lineage", "alone", "--json").stdout)
    (release,) = tree["targets"][0]["releases"]
    assert tree["aliases"]["champion"] == "alone-release/1"
    assert json.loads(release["tags"]["lockstep.approval"]).items() >= word.items()
    assert {part: release["tags"][f"lockstep.{part}"] for part in ("target", "drafter", "quant")} == {
        "target": "alone/1",
        "drafter": "alone-drafter/1",
        "quant": "alone-quant/1",
    }
    # the server writes events, and starts what they ask for, some seconds later
    until(lambda: "lockstep.release.promoted" in (event["event"] for event in _events(prefect_api)))
    until(lambda: len(_runs(prefect_api, "release")) > 1)
    told = [event["event"] for event in _events(prefect_api)]
    assert sorted(told) == [
        "lockstep.drafter.drifted",
        "lockstep.drafter.measured",
        "lockstep.quant.measured",
        "lockstep.release.promoted",
        "lockstep.target.registered",
    ]
    started = {flow: _runs(prefect_api, flow) for flow in ("watch", "quantize", "drafter", "release")}
    assert {flow: len(runs) for flow, runs in started.items()} == dict(watch=1, quantize=1, drafter=1, release=2)
    assert sorted(run["state_name"] for run in started["release"]) == ["Completed", "Waiting"]
    assert {run["created_by"]["type"] for runs in started.values() for run in runs} == {"AUTOMATION"}


def _runs(api: str, flow: str, *states: str) -> list[dict]:
    wanted = {"flows": {"name": {"any_": [flow]}}}
    if states:
        wanted["flow_runs"] = {"state": {"type": {"any_": list(states)}}}
    found = web.post(f"{api}/flow_runs/filter", json=wanted).json()
    return [run for run in found if _is_ours(run)]


def _bad(api: str) -> list[dict]:
    found = web.post(
        f"{api}/flow_runs/filter", json={"flow_runs": {"state": {"type": {"any_": ["FAILED", "CRASHED"]}}}}
    )
    return [run for run in found.json() if _is_ours(run)]


def _is_ours(run: dict) -> bool:
    return run["parameters"].get("config", {}).get("target", {}).get("name") == "alone"


def _events(api: str) -> list[dict]:
    wanted = {"event": {"prefix": ["lockstep."]}, "resource": {"labels": {"lockstep.name": ["alone"]}}}
    return web.post(f"{api}/events/filter", json={"filter": wanted}).json()["events"]
