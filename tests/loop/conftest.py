"""The services of one machine, started once a session in a home of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.services.home import home

LOCKSTEP = Path(sys.executable).with_name("lockstep")


@pytest.fixture(scope="session")
def planted() -> str:
    """A word that is part of each secret which the machine's environment holds while flows run on it."""
    return "planted-1618033988749"


@pytest.fixture(scope="session")
def machine(tmp_path_factory, planted) -> dict[str, str]:
    """Environment of a machine on which nothing has run; prepared models are shared with the usual home."""
    here = tmp_path_factory.mktemp("home")
    for shared in ("models", "packages"):
        (home() / shared).mkdir(parents=True, exist_ok=True)
        (here / shared).symlink_to(home() / shared)
    ours = ("PREFECT_", "MLFLOW_", "LOCKSTEP_", "OMP_")  # the last is of the tests' own process
    usual = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    found = os.pathsep.join(
        map(str, (Path(__file__).parent, Path(__file__).parents[2]))
    )  # the demo flow, and this tree
    secrets = {name: f"{planted}-{name}" for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENAI_API_KEY")}
    return usual | secrets | {"LOCKSTEP_HOME": str(here), "PYTHONPATH": found}


@pytest.fixture(scope="session")
def lockstep(machine) -> Callable[..., subprocess.CompletedProcess]:
    """`lockstep(*arguments)` on that machine."""

    def call(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([LOCKSTEP, *arguments], env=machine, capture_output=True, text=True)

    return call


@pytest.fixture(scope="session")
def services(lockstep, machine) -> Iterator[dict[str, str]]:
    """The machine's environment, with Prefect's server and worker and MLflow running."""
    started = lockstep("up")
    try:
        assert started.returncode == 0, started.stderr
        yield machine
    finally:
        stopped = lockstep("down")
    assert stopped.returncode == 0, stopped.stderr


@pytest.fixture(scope="session")
def prefect_api(services) -> str:
    """Address of the session's Prefect API."""
    record = json.loads((Path(services["LOCKSTEP_HOME"]) / "services/prefect.json").read_text())
    return f"{record['address']}/api"


@pytest.fixture(scope="session")
def deployed(services, prefect_api, tmp_path_factory) -> dict[str, str]:
    """The services' environment, with the demo flow deployed as ours are."""
    file = tmp_path_factory.mktemp("demo") / "prefect.yaml"
    file.write_text(
        "name: demo\npull: [{prefect.deployments.steps.set_working_directory: {directory: '.'}}]\n"
        "deployments: [{name: demo, entrypoint: demo_flows.demo, tags: [lockstep], work_pool: {name: lockstep}}]\n"
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
