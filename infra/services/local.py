"""The services of one machine: Prefect server, worker and MLflow."""

import contextlib
import fcntl
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from infra.services import supervise
from infra.services.home import home
from infra.services.record import Record
from infra.services.supervise import LOOPBACK, ServiceError
from infra.serving.state import KEY_VARIABLE, Wish

PREFECT_PORT, MLFLOW_PORT = 4200, 5000
FLEET = "fleet"
READY_S = 180.0

Say = Callable[[str], None]


def up(say: Say, *, prefect_port: int | None = None, mlflow_port: int | None = None) -> list[Record]:
    """Start what does not run yet, all at once, wait until each answers, deploy the flows, and give the records.

    say: told one line per event.
    prefect_port, mlflow_port: None takes the usual port or the next free one; a given port must be free.
    Raises ServiceError naming the service, the cause and what to do.
    """
    with _locked(), ThreadPoolExecutor() as pool:
        starts = [pool.submit(_prefect, say, prefect_port), pool.submit(_mlflow, say, mlflow_port)]
        return [record for start in starts for record in start.result()]


def serve(say: Say, wish: Wish, *, port: int | None = None) -> Record:
    """Start the fleet, or leave the one that runs; it serves `wish`. Gives its record; its address is the stable one.

    port: None takes the port that it had before, or `wish.config.port`, or the next free one.
    Raises ServiceError when a fleet of another target runs, or when others than this machine would need no key.
    """
    if wish.config.host != LOOPBACK and not os.environ.get(KEY_VARIABLE):
        raise ServiceError(
            f"release.fleet.host={wish.config.host} is open to other machines: set {KEY_VARIABLE} to a key that "
            f"clients must send, or use {LOOPBACK}"
        )
    with _locked():
        before, last = Record.read(FLEET), Wish.read()
        if before and supervise.alive(before):
            if last and last.name != wish.name:
                raise ServiceError(f"the fleet serves {last.name}: run `lockstep down` before it serves {wish.name}")
        else:
            wish.model_copy(update={"generation": last.generation + 1 if last else 0}).write()
        command = [sys.executable, "-u", "-m", "infra.serving.process"]
        record = _ensure(FLEET, lambda port: [*command, str(port)], wish.config.port, port, {}, say)
        supervise.wait_ready(record, lambda: healthy(record), READY_S)
        return record


def stop_serving() -> bool:
    """End the fleet alone; whether there was one."""
    with _locked():
        record = Record.read(FLEET)
        return record is not None and supervise.stop(record) > 0


def down(say: Say) -> int:
    """End every service that `up` started, with all it started. Gives the number of processes ended."""
    with _locked(), ThreadPoolExecutor() as pool:
        records = Record.all()
        worker = [r for r in records if r.name == "worker"]  # first: its flows end while the server can note it
        others = [r for r in records if r.name != "worker"]
        ended = 0
        for group in (worker, others):
            for record, count in zip(group, pool.map(supervise.stop, group), strict=True):
                what = f"ended {count} process{'' if count == 1 else 'es'}" if count else "was not running"
                say(f"{record.name}: {what}")
                ended += count
        return ended


def healthy(record: Record) -> bool:
    """Whether the service runs and, if it listens, answers."""
    if not supervise.alive(record):
        return False
    paths = {"prefect": "/api/health", "mlflow": "/health", FLEET: "/fleet"}
    return answers(record.address + paths[record.name]) if record.name in paths else True


def answers(url: str) -> bool:
    """Whether an HTTP GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _prefect(say: Say, port: int | None) -> list[Record]:
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]

    env = {
        "PREFECT_API_DATABASE_TIMEOUT": "60",  # s; SQLite on a machine whose cores are all busy
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_UI_API_URL": "/api",  # the page asks the server it came from, on any port and through any tunnel
    }
    before, worker = Record.read("prefect"), Record.read("worker")
    server = _ensure("prefect", command, PREFECT_PORT, port, env, say)
    if before and before.port != server.port and worker:
        supervise.stop(worker)  # it talks to the old address
    os.environ["PREFECT_API_URL"] = f"{server.address}/api"

    from infra.services import deployments  # Prefect is imported here, while the server starts

    supervise.wait_ready(server, lambda: healthy(server), READY_S)
    deployments.prepare()
    worker = _ensure_worker(say)
    deployments.deploy(say)
    supervise.wait_ready(worker, lambda: deployments.worker_online(worker.name), READY_S)
    return [server, worker]


def _ensure_worker(say: Say) -> Record:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "lockstep", "--type", "process"]
    env = {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_WORKER_HEARTBEAT_SECONDS": "10"}
    return _ensure("worker", lambda port: [*command, "--name", "worker"], 0, None, env, say)


def _mlflow(say: Say, port: int | None) -> list[Record]:
    folder = home() / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)

    def command(port: int) -> list[str]:
        store = [
            f"--backend-store-uri=sqlite:///{folder / 'mlflow.db'}",
            f"--artifacts-destination={folder / 'artifacts'}",
        ]
        return [sys.executable, "-m", "mlflow", "server", f"--host={LOOPBACK}", f"--port={port}", "--workers=1", *store]

    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = _ensure("mlflow", command, MLFLOW_PORT, port, env, say)
    supervise.wait_ready(server, lambda: healthy(server), READY_S)
    return [server]


def _ensure(name: str, command, usual_port: int, port: int | None, env: dict, say: Say) -> Record:
    """The running service `name`, started if need be on `port`, or on the port it had before, or on `usual_port`."""
    before = Record.read(name)
    if before and supervise.alive(before):
        if port not in (None, before.port):
            raise ServiceError(
                f"{name} already runs on port {before.port}: run `lockstep down` before moving it to {port}"
            )
        say(f"{name}: already running{f' at {before.address}' if before.address else ''}")
        return before
    if before:
        supervise.stop(before)  # what a dead leader left behind
    chosen = 0
    if usual_port:
        chosen, why = supervise.choose_port(port or (before.port if before else usual_port), strict=port is not None)
        if why:
            say(f"{name}: {why}")
    record = supervise.start(name, command(chosen), env=env, port=chosen)
    say(f"{name}: starting{f' at {record.address}' if record.address else ''}")
    return record


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    (home() / "services").mkdir(parents=True, exist_ok=True)
    with open(home() / "services" / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError("another `lockstep up` or `down` is at work here: wait until it ends") from None
        yield
