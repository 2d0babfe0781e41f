"""Runs on a real Prefect server: followed, killed in both modes, marked crashed, continued with what is finished."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

SCRIPT = Path(__file__).with_name("demo.py")
MODES = pytest.mark.parametrize("mode", [[], ["--local"]], ids=["worker", "local"])


@pytest.fixture(scope="module")
def deployed(services, prefect_api, tmp_path_factory) -> dict[str, str]:
    """The services' environment, with the demo flow deployed as ours are."""
    file = tmp_path_factory.mktemp("demo") / "prefect.yaml"
    file.write_text(
        "name: demo\npull: [{prefect.deployments.steps.set_working_directory: {directory: '.'}}]\n"
        "deployments: [{name: demo, entrypoint: demo_flows.demo, work_pool: {name: lockstep}}]\n"
    )
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    done = subprocess.run(command, env=services | {"PREFECT_API_URL": prefect_api}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return services


@pytest.fixture
def folder(tmp_path) -> Path:
    """The demo's folder, with the gate at which its second phase waits."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path


def demo(environment, folder, *options) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), str(folder), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def at_the_gate(folder: Path) -> Iterator[int]:
    """Waits until the second phase waits; inside, its process is known; after, the gate is open for good."""
    with open(folder / "gate", "w"):
        yield int((folder / "second.pid").read_text())
        (folder / "gate").unlink()


def flow_run(api: str, told: str) -> dict:
    """The flow run whose page the command named."""
    return httpx.get(f"{api}/flow_runs/{told.split('/runs/flow-run/')[1].split()[0]}").json()


def below(api: str, run: dict) -> list[dict]:
    """The flow runs that `run` called, and the task runs of all."""
    wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}}
    called = httpx.post(f"{api}/flow_runs/filter", json=wanted).json()
    ids = [run["id"], *(c["id"] for c in called)]
    return called + httpx.post(f"{api}/task_runs/filter", json={"flow_runs": {"id": {"any_": ids}}}).json()


def until(condition: Callable[[], object], patience_s: float = 240.0) -> object:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.2)
    return found


@pytest.fixture(scope="module")
def silent(deployed, prefect_api, tmp_path_factory) -> str:
    """A local run that was killed in a home of its own, where no later command settles it; what it had told."""
    folder, elsewhere = tmp_path_factory.mktemp("silent"), tmp_path_factory.mktemp("elsewhere")
    os.mkfifo(folder / "gate")
    victim = demo(deployed | {"LOCKSTEP_HOME": str(elsewhere), "PREFECT_API_URL": prefect_api}, folder, "--local")
    with at_the_gate(folder) as pid:
        until(lambda: heartbeats(prefect_api))
        os.kill(pid, signal.SIGKILL)
        return victim.communicate()[1]


def heartbeats(api: str) -> list[dict]:
    wanted = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}}}
    return httpx.post(f"{api}/events/filter", json=wanted).json()["events"]


@MODES
def test_a_killed_run_is_marked_crashed_and_continues_with_its_finished_phase(
    silent, deployed, prefect_api, folder, mode
):
    victim = demo(deployed, folder, *mode)
    with at_the_gate(folder) as pid:
        os.kill(pid, signal.SIGKILL)
        _, told = victim.communicate()
    assert victim.returncode == (-signal.SIGKILL if mode else 1)
    assert mode or "continues it" in told.splitlines()[-1]

    again = demo(deployed, folder, *mode)
    out, told_again = again.communicate()
    assert again.returncode == 0, told_again
    assert json.loads(out) == {"what": "first, second", "where": str(folder)}
    assert "make first: cached" in told_again
    assert len((folder / "first.calls").read_text().split()) == 1

    dead = flow_run(prefect_api, told)
    assert dead["state_type"] == "CRASHED"
    assert not {part["state_type"] for part in below(prefect_api, dead)} & {"RUNNING", "PENDING"}
    alive = flow_run(prefect_api, told_again)
    assert alive["state_type"] == "COMPLETED"
    assert "Cached" in {part["state_name"] for part in below(prefect_api, alive)}


@MODES
def test_an_interrupt_stops_the_run_and_says_how_to_continue(deployed, prefect_api, folder, mode):
    victim = demo(deployed, folder, *mode)
    with at_the_gate(folder):
        victim.send_signal(signal.SIGINT)
        _, told = victim.communicate()
    assert victim.returncode == 1
    assert told.splitlines()[-1].endswith(f"`{' '.join(['lockstep demo', *mode])}` continues it")
    assert "Traceback" not in told
    assert flow_run(prefect_api, told)["state_type"] in ("CANCELLED", "CRASHED")


def test_a_finished_run_starts_anew_and_a_gate_that_refuses_ends_with_code_3(deployed, tmp_path):
    done = demo(deployed, tmp_path, "--local")
    _, told = done.communicate()
    assert done.returncode == 0
    assert "at the gate (1/2)" in told
    (tmp_path / "refuse").touch()
    for _ in range(2):
        refused = demo(deployed, tmp_path, "--local")
        _, told = refused.communicate()
        assert refused.returncode == 3
        assert told.splitlines()[-1] == "acceptance 1.1 is below 1.3"
    keys = (tmp_path / "first.calls").read_text().split()
    assert len(keys) == len(set(keys)) == 3


def test_a_failed_flow_ends_with_one_line_and_can_be_abandoned(deployed, tmp_path):
    (tmp_path / "fail").touch()
    for options in ([], ["--new"]):
        failed = demo(deployed, tmp_path, "--local", *options)
        out, told = failed.communicate()
        assert failed.returncode == 1
        assert told.splitlines()[-1] == "the disk is full: free some"
        assert "Traceback" not in told + out
    assert len(set((tmp_path / "first.calls").read_text().split())) == 2


def test_a_silent_run_is_marked_crashed_by_the_server_alone(silent, prefect_api):
    crashed = until(lambda: (run := flow_run(prefect_api, silent))["state_type"] == "CRASHED" and run)
    assert "no heartbeat" in crashed["state"]["message"]
