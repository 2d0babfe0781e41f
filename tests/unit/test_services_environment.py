"""What one process is told of the services: the addresses of now, unless the user chose others."""

import os

import pytest

from infra.services import catalog, environment, supervise
from infra.services.record import Record


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A home without services, in a process that was told nothing."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME"):
        monkeypatch.setenv(name, "")  # put back by monkeypatch whatever `apply` sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_applied", {})
    return tmp_path


def listens(name: str, port: int) -> None:
    address = f"http://127.0.0.1:{port}"
    Record(name=name, pid=os.getpid(), started=0.0, token="", port=port, address=address, log=os.devnull).write()


def test_what_was_true_before_a_service_started_or_moved_is_not_taken_for_the_users_wish(fresh):
    environment.apply()
    assert environment.tracking_uri() == f"sqlite:///{fresh}/mlflow/mlflow.db"
    for port in (5000, 5001):
        listens("mlflow", port)
        listens("prefect", port + 1)
        environment.apply()
        assert environment.tracking_uri() == os.environ["MLFLOW_TRACKING_URI"] == f"http://127.0.0.1:{port}"
        assert os.environ["PREFECT_API_URL"] == f"http://127.0.0.1:{port + 1}/api"


def test_the_users_own_server_wins_over_the_one_started_here(fresh, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://books:5000")
    for _ in range(2):
        listens("mlflow", 5000)
        environment.apply()
        assert environment.tracking_uri() == "http://books:5000"


@pytest.mark.parametrize("users", [None, "http://books:5000"])
def test_the_worker_hands_its_runs_the_users_choice_of_mlflow_and_no_other(fresh, monkeypatch, users):
    """It may start before MLflow listens, and outlive it; each run then looks for itself where MLflow is."""
    if users:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", users)
    listens("mlflow", 5000)
    environment.apply()
    wanted = catalog.service("worker", "local")
    record = supervise.start("worker", ["env"], env=wanted.env)
    supervise.wait_ready(record, lambda: not supervise.alive(record), 600)
    told = dict(line.split("=", 1) for line in record.log.read_text().splitlines() if "=" in line)
    assert told.get("MLFLOW_TRACKING_URI") == users


def test_a_password_in_an_address_is_handed_on_beside_it(fresh, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ann:a%40b@books:5000/x")
    monkeypatch.setenv("PREFECT_API_URL", "https://bob:word@runs/api")
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for _ in range(2):
        environment.apply()
        assert environment.tracking_uri() == os.environ["MLFLOW_TRACKING_URI"] == "https://books:5000/x"
        assert os.environ["PREFECT_API_URL"] == "https://runs/api"
        assert os.environ["PREFECT_API_AUTH_STRING"] == "bob:word"
        assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("ann", "a@b")
