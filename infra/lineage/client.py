"""The connection to MLflow: an SQLite file on this machine, or a server."""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.lineage.versions import LineageError
from infra.services.environment import QUIET, credentials
from infra.services.record import Record

EXPERIMENT = "lockstep"
RESTART_S = 300.0
_SQLITE_WAIT_S = 60  # how long a writer waits for another one


@cache
def connect(uri: str):
    """An MlflowClient for `uri` (`sqlite:///FILE` or `http(s)://...`), one for each in this process.

    Raises LineageError when a server does not answer.
    """
    quiet = QUIET | {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"} | credentials()
    os.environ.update({k: v for k, v in quiet.items() if k not in os.environ})  # telemetry is decided on import
    for noisy in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if not uri.startswith("sqlite:"):
        _check_server(uri)
    from mlflow import MlflowClient

    if not uri.startswith("sqlite:"):
        return MlflowClient(uri, registry_uri=uri)
    file = sqlite_file(uri)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that make the tables at once leave none of them usable
        waiting = f"{uri}?timeout={_SQLITE_WAIT_S}"
        client = MlflowClient(waiting, registry_uri=waiting)
        client.search_registered_models(max_results=1)
    return client


def experiment_id(client, uri: str) -> str:
    """The experiment that Lockstep's runs are in, made when it is not there."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        where = (sqlite_file(uri).parent / "artifacts").as_uri() if uri.startswith("sqlite:") else None
        try:
            return client.create_experiment(EXPERIMENT, artifact_location=where)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(EXPERIMENT)
    return found.experiment_id


def write(change: Callable[..., Any], *arguments: str) -> None:
    """Call a method of the client that sets one thing (a tag, an alias), which may be called again.

    MLflow looks whether the row is there and then adds it: of two writers at once the later one fails on the row of the
    other, and finds it when asked again.
    """
    from mlflow.exceptions import MlflowException

    try:
        change(*arguments)
    except MlflowException as error:
        if error.error_code != "BAD_REQUEST":
            raise
        change(*arguments)


def sqlite_file(uri: str) -> Path:
    """The file of an SQLite URI."""
    return Path("/" + urlsplit(uri).path.lstrip("/"))


def _check_server(uri: str) -> None:
    import httpx

    kept = Record.read("keeper") is not None  # what died a moment ago is about to be started again
    deadline = time.monotonic() + (RESTART_S if kept else 0)
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{part}", "") for part in ("USERNAME", "PASSWORD"))
    while True:
        try:
            httpx.get(
                f"{uri.rstrip('/')}/health", timeout=10, auth=(user, password) if user else None
            ).raise_for_status()
            return
        except httpx.HTTPError as failed:
            error = failed
        if time.monotonic() < deadline:
            time.sleep(0.5)
            continue
        raise LineageError(
            f"MLflow does not answer at {uri} ({error or type(error).__name__}): start the services with "
            f"`lockstep up`, or set MLFLOW_TRACKING_URI"
        ) from None
