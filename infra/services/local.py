"""The services of one machine, started and stopped together."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from infra.services import catalog, postgres, profile, supervise
from infra.services.catalog import Say, Service, ensure, service
from infra.services.home import home
from infra.services.profile import Profile
from infra.services.record import Record
from infra.services.supervise import LOOPBACK, PortTaken, ServiceError
from infra.serving.state import KEY_VARIABLE, Wish

FLEET = "fleet"
READY_S = 600.0  # a first start writes its tables, each synced to a disk that may be slow


class Busy(ServiceError):
    """Services are being started or stopped here by somebody else."""


def up(
    say: Say, wanted: Profile | None = None, *, prefect_port: int | None = None, mlflow_port: int | None = None
) -> list[Record]:
    """Start what does not run yet, all at once, wait until each answers, deploy the flows, and give the records.

    say: told one line per event.
    wanted: the profile; None is the one that was up last, `local` at first.
    prefect_port, mlflow_port: None takes the usual port or the next free one; a given port must be free.
    Raises ServiceError naming the service, the cause and what to do.
    """
    with locked(), ThreadPoolExecutor() as pool:
        chosen = _choose(wanted, say)
        below = {name: pool.submit(_start, name, say) for name in ("postgres", "seaweedfs") if chosen == "team"}
        needs = [start.result for start in below.values()]
        starts = [pool.submit(_prefect, say, prefect_port, needs[:1]), pool.submit(_mlflow, say, mlflow_port, needs)]
        records = [*(need() for need in needs), *(record for start in starts for record in start.result())]
        if chosen == "team":
            records.append(ensure(service("keeper", chosen), say))  # last: it finds everything there
        return records


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
    with locked():
        before, last = Record.read(FLEET), Wish.read()
        if before and supervise.alive(before):
            if last and last.name != wish.name:
                raise ServiceError(f"the fleet serves {last.name}: run `lockstep down` before it serves {wish.name}")
        else:
            wish.model_copy(update={"generation": last.generation + 1 if last else 0}).write()
        fleet = replace(service(FLEET, profile.current()), usual_port=wish.config.port)
        return _once_ready(fleet, ensure(fleet, say, port), say, port)


def stop_serving() -> bool:
    """End the fleet alone; whether there was one."""
    with locked():
        record = Record.read(FLEET)
        return record is not None and supervise.stop(record) > 0


def down(say: Say) -> int:
    """End every service that `up` started, with all it started. Gives the number of processes ended."""
    keeper = Record.read("keeper")
    ended = _stop([keeper], say) if keeper else 0  # before the lock, which it takes when it starts something
    with locked():
        records = Record.all()
        # each ends while what it needs is there
        stages = (("worker",), (FLEET, "prefect", "mlflow"), ("postgres", "seaweedfs"))
        return ended + sum(_stop([record for record in records if record.name in names], say) for names in stages)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold the services of this home. Raises Busy while another process does."""
    (home() / "services").mkdir(parents=True, exist_ok=True)
    with open(home() / "services" / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy("another `lockstep up` or `down` is at work here: wait until it ends") from None
        yield


def _choose(wanted: Profile | None, say: Say) -> Profile:
    before = profile.current()
    chosen = wanted or before
    if chosen != before and Record.all():
        raise ServiceError(f"services of profile {before} were started here: `lockstep down` first")
    if chosen == "team":
        postgres.binary("postgres")
    if chosen != before and (home() / "runs").is_dir():
        say(f"profile {chosen} has books and artifacts of its own: versions of profile {before} are not in them")
    profile.remember(chosen)
    return chosen


def _stop(records: list[Record], say: Say) -> int:
    ended = 0
    with ThreadPoolExecutor() as pool:
        for record, count in zip(records, pool.map(catalog.stop, records), strict=True):
            what = f"ended {count} process{'' if count == 1 else 'es'}" if count else "was not running"
            say(f"{record.name}: {what}")
            ended += count
    return ended


def _start(name: str, say: Say, port: int | None = None) -> Record:
    wanted = service(name, profile.current())
    return _once_ready(wanted, ensure(wanted, say, port), say, port)


def _once_ready(wanted: Service, record: Record, say: Say, port: int | None) -> Record:
    """Its record once it is ready. Where nobody gave its port and another process was faster, it starts on the next."""
    while True:
        try:
            supervise.wait_ready(record, lambda record=record: wanted.ready(record), READY_S)
            return record
        except PortTaken:
            if port is not None:
                raise
            record = ensure(wanted, say)


def _prefect(say: Say, port: int | None, needs: list) -> list[Record]:
    for need in needs:
        need()
    before, worker = Record.read("prefect"), Record.read("worker")
    wanted = service("prefect", profile.current())
    server = ensure(wanted, say, port)
    os.environ["PREFECT_API_URL"] = f"{server.address}/api"

    from prefect.settings import PREFECT_API_URL, temporary_settings

    from infra.services import deployments  # Prefect is imported here, while the server starts

    server = _once_ready(wanted, server, say, port)
    if before and before.port != server.port and worker:
        supervise.stop(worker)  # it talks to the old address
    address = os.environ["PREFECT_API_URL"] = f"{server.address}/api"
    with temporary_settings({PREFECT_API_URL: address}):  # it may have moved since Prefect was imported
        deployments.prepare()
        worker = ensure(service("worker", profile.current()), say)
        deployments.deploy(say)
        supervise.wait_ready(worker, lambda: deployments.worker_online(worker.name), READY_S)
    return [server, worker]


def _mlflow(say: Say, port: int | None, needs: list) -> list[Record]:
    for need in needs:
        need()
    return [_start("mlflow", say, port)]
