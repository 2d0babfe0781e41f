"""Start and stop processes that outlive the command that started them, and nothing but those."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from infra.services import environment
from infra.services.home import home
from infra.services.record import Record, ServiceError

TOKEN = "LOCKSTEP_SERVICE"
LOOPBACK = "127.0.0.1"
POLL_S = 0.1
GRACE_S = 15.0
KILLED_S = 60.0  # no process refuses to be killed, but on a busy machine that takes a while


class PortTaken(ServiceError):
    """Another process took the port of a service between the choice and the start."""


def start(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    port: int = 0,
    scheme: str = "http",
) -> Record:
    """Start `command` in its own session with its output in `home()/logs/NAME.log`, and write its record.

    env: variables beside the current ones and those of `environment.variables`; None takes one away.
    port: where it will listen on loopback, 0 for nowhere; scheme: what it speaks there.
    The previous log is kept as NAME.log.1.
    """
    log = home() / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        os.replace(log, log.with_suffix(".log.1"))
    token = f"{name}-{secrets.token_hex(8)}"
    variables = {**os.environ, **environment.variables(), **(env or {}), TOKEN: token}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env={key: value for key, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=home(),
        )
    record = Record(
        name=name,
        pid=process.pid,
        started=psutil.Process(process.pid).create_time(),
        token=token,
        port=port,
        address=f"{scheme}://{LOOPBACK}:{port}" if port else "",
        log=log,
    )
    record.write()
    return record


def alive(record: Record) -> bool:
    """Whether the very process of `record` still runs (its pid alone may have been given to another)."""
    try:
        process = psutil.Process(record.pid)
        return abs(process.create_time() - record.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(record: Record) -> list[psutil.Process]:
    """The process of `record` and everything it started that still runs, however deep and whoever its parent is now,
    but for other services."""
    found, waiting = set(), [process for process in psutil.process_iter() if _token(process) == record.token]
    while waiting:
        process = waiting.pop()
        if process not in found and _token(process) in (record.token, None):  # a child may have overwritten its own
            found.add(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                waiting += process.children()
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def wait_ready(record: Record, ready: Callable[[], bool], timeout_s: float) -> None:
    """Wait until `ready()`, and until it is this very service that listens on its port: another one may have taken it
    between the choice and the start. Raises ServiceError with the end of its log when the process dies or takes too
    long, PortTaken when it died because another one listens there."""
    deadline = time.monotonic() + timeout_s
    while not (ready() and listens(record)):
        if not alive(record):
            if record.port and not _free(record.port) and not listens(record):
                raise PortTaken(f"{record.name}: port {record.port} was taken meanwhile by {_owner(record.port)}")
            raise ServiceError(f"{record.name} ended while starting: {_last_words(record.log)} (log: {record.log})")
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{record.name} (pid {record.pid}) did not answer within {timeout_s:.0f} s: see {record.log}, then "
                f"`lockstep down` and `lockstep up`"
            )
        time.sleep(POLL_S)


def listens(record: Record) -> bool:
    """Whether the service, or a process that it started, listens on its port; True for one that has none."""
    if not record.port:
        return True
    owners = {c.pid for c in _listening(record.port)}
    return bool(owners & {process.pid for process in family(record)})


def stop(record: Record, grace_s: float = GRACE_S) -> int:
    """End the process of `record` and all it started, then forget it. Gives the number of processes ended."""
    ended = end(record, grace_s)
    record.forget()
    return ended


def end(record: Record, grace_s: float = GRACE_S) -> int:
    """End the process of `record` and all it started: first it alone is asked, then the rest, then the deaf are killed.
    Gives the number of processes ended."""
    members = family(record)
    leader = [p for p in members if p.pid == record.pid]
    for group in (leader, members):
        for process in group:
            _signal(process, signal.SIGTERM)
        psutil.wait_procs(group, timeout=grace_s)
    for process in family(record):
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(members, timeout=KILLED_S)
    return len(members)


def choose_port(wanted: int, *, strict: bool, count: int = 1) -> tuple[int, str]:
    """The first of `count` free loopback ports in a row: `wanted` or the next one above it where they are free, and a
    line that says why it is another, else "".

    Raises ServiceError when `strict` and one of those from `wanted` on is taken.
    """
    in_the_way = [port for port in range(wanted, wanted + count) if not _free(port)]
    if not in_the_way:
        return wanted, ""
    taken = f"port {in_the_way[0]} is taken by {_owner(in_the_way[0])}"
    if strict:
        raise ServiceError(f"{taken}: stop it or choose another port")
    port = next(p for p in range(wanted + 1, 65536 - count) if all(_free(q) for q in range(p, p + count)))
    return port, f"{taken}; using {port}"


def _token(process: psutil.Process) -> str | None:
    """Which service the process belongs to, None when it does not say."""
    try:
        return process.environ().get(TOKEN)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None  # gone meanwhile, or another user's, so not ours


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _owner(port: int) -> str:
    for connection in _listening(port):
        if connection.pid:
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another user's process"


def _listening(port: int) -> list:
    return [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # ended by itself


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1]
