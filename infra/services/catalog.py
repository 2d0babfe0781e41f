"""The services there are: what runs each, where it listens, when it is ready."""

import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from infra.services import environment, postgres, seaweed, supervise
from infra.services.home import home
from infra.services.profile import Profile
from infra.services.record import Record
from infra.services.supervise import LOOPBACK, ServiceError

PORTS = {  # the usual ones
    "prefect": 4200,
    "mlflow": 5000,
    "fleet": 8000,
    "postgres": postgres.PORT,
    "seaweedfs": seaweed.PORT,
}
ORDER = ("postgres", "seaweedfs", "prefect", "mlflow", "worker", "keeper")  # each needs only what stands before it
GRACE_S = {"seaweedfs": 3.0}  # how long to wait once asked to end: it has written all by then, yet stays 15 s
ANSWER_S = 15.0  # one that works may be slow on a busy machine
CLEAN = {"seaweedfs": seaweed.clean}  # what of a service that has ended lies outside the home

Say = Callable[[str], None]


@dataclass(frozen=True)
class Service:
    """One service.

    command: gives the command line for a port, the first of `ports` in a row from `usual_port` on, 0 for none.
    prepare: what must be done before each start. ready: whether it does its work, asked often after a start.
    """

    name: str
    command: Callable[[int], Sequence[str]]
    usual_port: int = 0
    ports: int = 1
    scheme: str = "http"
    env: Mapping[str, str | None] | None = None
    prepare: Callable[[], None] = lambda: None
    ready: Callable[[Record], bool] = supervise.alive


def service(name: str, profile: Profile) -> Service:
    """The service `name` of `profile`. What it needs must have been started: its settings name their addresses."""
    return {
        "postgres": _postgres,
        "seaweedfs": _seaweedfs,
        "prefect": lambda: _prefect(profile),
        "mlflow": lambda: _mlflow(profile),
        "worker": _worker,
        "fleet": _fleet,
        "keeper": _keeper,
    }[name]()


def healthy(record: Record) -> bool:
    """Whether the service runs and, if it listens, answers."""
    paths = {"prefect": "/api/health", "mlflow": "/health", "seaweedfs": "/healthz", "fleet": "/fleet"}
    if not supervise.alive(record):
        return False
    if record.name == "postgres":
        return postgres.ready(record)
    return answers(record.address + paths[record.name]) if record.name in paths else True


def answers(url: str) -> bool:
    """Whether an HTTP GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def ensure(service: Service, say: Say, port: int | None = None) -> Record:
    """The running `service`, started if need be on `port`, or on the port it had before, or on its usual one.

    port: None takes the next free one when that is taken; a given port must be free.
    Raises ServiceError when it is not.
    """
    name, before = service.name, Record.read(service.name)
    if before and supervise.alive(before):
        if port not in (None, before.port):
            raise ServiceError(
                f"{name} already runs on port {before.port}: run `lockstep down` before moving it to {port}"
            )
        say(f"{name}: already running{f' at {before.address}' if before.address else ''}")
        return before
    if before:
        supervise.end(before)  # what a dead leader left behind; its record stands until there is another
        _clean(before)
    service.prepare()
    chosen = 0
    if service.usual_port:
        wanted = port or (before.port if before else service.usual_port)
        chosen, why = supervise.choose_port(wanted, strict=port is not None, count=service.ports)
        if why:
            say(f"{name}: {why}")
    record = supervise.start(name, service.command(chosen), env=service.env, port=chosen, scheme=service.scheme)
    say(f"{name}: starting{f' at {record.address}' if record.address else ''}")
    return record


def stop(record: Record) -> int:
    """End the service of `record` with all it started and left. Gives the number of processes ended."""
    ended = supervise.stop(record, GRACE_S.get(record.name, supervise.GRACE_S))
    _clean(record)
    return ended


def _clean(record: Record) -> None:
    if record.name in CLEAN:
        CLEAN[record.name](record)


def _postgres() -> Service:
    return Service(
        "postgres",
        postgres.command,
        usual_port=PORTS["postgres"],
        scheme="postgresql",
        prepare=postgres.prepare,
        ready=postgres.ready,
    )


def _seaweedfs() -> Service:
    return Service(
        "seaweedfs",
        seaweed.command,
        usual_port=PORTS["seaweedfs"],
        ports=seaweed.PORTS,
        prepare=seaweed.prepare,
        ready=seaweed.ready,
    )


def _prefect(profile: Profile) -> Service:
    def command(port: int) -> list[str]:
        start = [sys.executable, "-m", "infra.services.prefect_server", "server", "start"]
        return [*start, "--host", LOOPBACK, "--port", str(port)]

    env = {
        "PREFECT_API_DATABASE_TIMEOUT": "60",  # s; SQLite on a machine whose cores are all busy
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_UI_API_URL": "/api",  # the page asks the server it came from, on any port and through any tunnel
    }
    if profile == "team":
        env["PREFECT_API_DATABASE_CONNECTION_URL"] = postgres.url(_running("postgres"), "asyncpg", "prefect")
        env["PGPASSFILE"] = str(postgres.passwords())
    return Service("prefect", command, usual_port=PORTS["prefect"], env=env, ready=healthy)


def _mlflow(profile: Profile) -> Service:
    env: dict[str, str | None] = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if profile == "team":
        books, files = postgres.url(_running("postgres"), "psycopg", "mlflow"), seaweed.MLFLOW
        env |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"))
        env |= {
            "PGPASSFILE": str(postgres.passwords()),
            "AWS_SHARED_CREDENTIALS_FILE": str(seaweed.credentials_file()),
            "AWS_DEFAULT_REGION": seaweed.REGION,
            "MLFLOW_S3_ENDPOINT_URL": _running("seaweedfs").address,
        }
    else:
        folder = home() / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        books, files = f"sqlite:///{folder / 'mlflow.db'}", str(folder / "artifacts")

    def command(port: int) -> list[str]:
        store = [f"--backend-store-uri={books}", f"--artifacts-destination={files}"]
        return [sys.executable, "-m", "mlflow", "server", f"--host={LOOPBACK}", f"--port={port}", "--workers=1", *store]

    return Service("mlflow", command, usual_port=PORTS["mlflow"], env=env, ready=healthy)


def _worker() -> Service:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "lockstep", "--type", "process"]
    env = {
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
        "MLFLOW_TRACKING_URI": environment.of_user("MLFLOW_TRACKING_URI"),  # each run looks for itself where it is
    }
    return Service("worker", lambda port: [*command, "--name", "worker"], env=env, prepare=_hand_back)


def _hand_back() -> None:
    if Record.read("worker"):  # of one that has died
        from infra.services import crashes

        crashes.hand_back("worker")


def _fleet() -> Service:
    command = [sys.executable, "-u", "-m", "infra.serving.process"]
    return Service("fleet", lambda port: [*command, str(port)], usual_port=PORTS["fleet"], ready=healthy)


def _keeper() -> Service:
    return Service("keeper", lambda port: [sys.executable, "-m", "infra.services.keeper"])


def _running(name: str) -> Record:
    record = Record.read(name)
    if record is None:
        raise ServiceError(f"{name} is not running: `lockstep up --profile team` starts it")
    return record
