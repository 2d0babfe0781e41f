"""Environment variables that every Lockstep process needs, and where the services of this machine are found."""

import os
from urllib.parse import unquote, urlsplit

from infra.config import confidential
from infra.services import profile
from infra.services.home import home
from infra.services.record import Record, ServiceError

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Idle OpenMP threads sleep: threads that spin on a core somebody else needs make two threads slower than one.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TQDM_DISABLE": "1",  # our own progress line says what runs
}

ADDRESSES = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")

_applied: dict[str, str] = {}


def variables() -> dict[str, str]:
    """Telemetry off, Prefect and its results under `home()`, and the addresses of the services that `lockstep up`
    started. A variable the user has set wins, so a team's own Prefect or MLflow server is joined by setting
    PREFECT_API_URL or MLFLOW_TRACKING_URI."""
    wanted = QUIET | {
        "LOCKSTEP_HOME": str(home()),
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home() / "results"),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "1",
    }
    server = Record.read("prefect")
    if server:
        wanted["PREFECT_API_URL"] = f"{server.address}/api"
    if profile.current() == "team":
        # what the server says while PostgreSQL comes back
        wanted["PREFECT_CLIENT_RETRY_EXTRA_CODES"] = "500"
        wanted["PREFECT_CLIENT_MAX_RETRIES"] = "7"  # four minutes: a keeper may have all services to start again
    if tracking := Record.read("mlflow"):
        wanted["MLFLOW_TRACKING_URI"] = tracking.address
    chosen = {name: of_user(name) or value for name, value in wanted.items()}
    secret = credentials()
    for name in ADDRESSES:
        if secret and (url := chosen.get(name, os.environ.get(name))):
            chosen[name] = confidential.shown(url) if _credentials(url) else url
    return chosen | secret


def credentials() -> dict[str, str]:
    """User and password that the user wrote into an address of `ADDRESSES`, as the variables that Prefect and MLflow
    take them from: the address is written on pages and in logs, and `variables` has it without them."""
    found = {}
    if given := _credentials(os.environ.get("PREFECT_API_URL", "")):
        found["PREFECT_API_AUTH_STRING"] = ":".join(given)
    if given := _credentials(os.environ.get("MLFLOW_TRACKING_URI", "")):
        found |= dict(zip(("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"), given, strict=True))
    return found


def _credentials(url: str) -> tuple[str, str] | None:
    parts = urlsplit(url)
    if not parts.scheme.startswith("http") or parts.username is None:
        return None
    return unquote(parts.username), unquote(parts.password or "")


def apply() -> None:
    """Set `variables` in this process. Prefect reads them once, on import: call this before."""
    wanted = variables()
    _applied.update({name: value for name, value in wanted.items() if of_user(name) is None})
    os.environ.update(wanted)


def of_user(name: str) -> str | None:
    """The variable `name` as this process was given it; None where it has none, or one that `apply` set: what was true
    then, before a service started or moved, must not pass for the user's wish."""
    value = os.environ.get(name)
    return None if value == _applied.get(name) else value


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, the MLflow server that `lockstep up` started, or else a SQLite file under `home()`.

    Raises ServiceError when the books of this home are in PostgreSQL and MLflow was not started.
    """
    if uri := variables().get("MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI")):
        return uri
    if profile.current() == "team":
        raise ServiceError("the services of profile team are not running: start them with `lockstep up`")
    return f"sqlite:///{home() / 'mlflow' / 'mlflow.db'}"
