"""Runs of the demo flow, and what a Prefect server knows of them."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

web = httpx.Client(timeout=300, limits=httpx.Limits(max_keepalive_connections=0))
"""A server with a busy database may take its time, and closes connections that were idle."""
SCRIPT = Path(__file__).with_name("demo.py")


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
    return by_id(api, told.split("/runs/flow-run/")[1].split()[0])


def below(api: str, run: dict) -> list[dict]:
    """The flow runs that `run` called, and the task runs of all."""
    wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}}
    called = web.post(f"{api}/flow_runs/filter", json=wanted).json()
    ids = [run["id"], *(c["id"] for c in called)]
    return called + web.post(f"{api}/task_runs/filter", json={"flow_runs": {"id": {"any_": ids}}}).json()


def until(condition: Callable[[], object], patience_s: float = 500.0) -> object:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.2)
    return found


def by_id(api: str, flow_run_id: str) -> dict:
    return web.get(f"{api}/flow_runs/{flow_run_id}").json()


def messages(api: str, run: dict) -> list[str]:
    """Of all states that the run had."""
    states = web.get(f"{api}/flow_run_states/", params={"flow_run_id": run["id"]}).json()
    return [state["message"] or "" for state in states]


def in_state(api: str, folder: Path, state: str) -> list[dict]:
    """The demo's runs in `folder` whose state is of this type."""
    wanted = {"flows": {"name": {"any_": ["demo"]}}, "flow_runs": {"state": {"type": {"any_": [state]}}}}
    found = web.post(f"{api}/flow_runs/filter", json=wanted).json()
    return [run for run in found if run["parameters"]["config"]["folder"] == str(folder)]


def paused(api: str, folder: Path) -> dict | None:
    """The run in `folder` that waits for a person, once its form is there, which is a moment after its state."""
    for run in in_state(api, folder, "PAUSED"):
        form = run["state"]["state_details"]["run_input_keyset"]["schema"]
        if web.get(f"{api}/flow_runs/{run['id']}/input/{form}").is_success:
            return run
    return None


def heartbeats(api: str, folder: Path) -> list[dict]:
    """Those of the running run in `folder`."""
    of = [f"prefect.flow-run.{run['id']}" for run in in_state(api, folder, "RUNNING")]
    wanted = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": of}}}
    return web.post(f"{api}/events/filter", json=wanted).json()["events"] if of else []


def call(environment: dict[str, str], script: str) -> str:
    """What the script printed."""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def automations(environment: dict[str, str], calls: str) -> str:
    """What `lockstep automate` asks of Prefect besides deploying; what that printed."""
    return call(environment, f"from infra.services.automations import notify, resume_crashed; {calls}")
