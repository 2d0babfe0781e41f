"""`up` and `down`: what was started is ended, and nothing else, whatever died or was in the way."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.services import local, supervise
from infra.services.catalog import Service
from infra.services.record import Record
from infra.services.supervise import PortTaken, ServiceError

LOCKSTEP = Path(sys.executable).with_name("lockstep")
FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; print(0, flush=True); time.sleep(600)'],"
    " stdout=subprocess.PIPE, start_new_session=True)\n"
    "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def taken():
    """A loopback port that this process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def started(code: str) -> tuple[Record, int]:
    """A service running `code`, and the number that it printed."""
    record = supervise.start("demo", [sys.executable, "-c", code])
    supervise.wait_ready(record, lambda: record.log.read_text().endswith("\n"), 600)
    return record, int(record.log.read_text())


def test_stop_ends_the_whole_family_and_spares_a_stranger():
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record, child = started(FAMILY)
    assert {p.pid for p in supervise.family(record)} == {record.pid, child}
    assert supervise.stop(record) == 2
    assert ended(child)
    assert Record.all() == []
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_what_a_killed_service_left_behind_is_ended_too():
    record, child = started(FAMILY)
    os.kill(record.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(record.pid)], timeout=600)
    assert not supervise.alive(record)
    assert supervise.stop(record) == 1
    assert ended(child)


def test_a_service_deaf_to_requests_is_killed():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(0, flush=True); time.sleep(600)"
    record, _ = started(deaf)
    assert supervise.stop(record, grace_s=0.5) == 1
    assert not supervise.alive(record)


def test_another_process_with_the_recorded_pid_is_left_alone():
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record, _ = started("import time; print(0, flush=True); time.sleep(600)")
    supervise.stop(record)
    reused = record.model_copy(update={"pid": stranger.pid, "started": record.started - 60})
    reused.write()
    assert not supervise.alive(reused)
    assert supervise.stop(reused) == 0
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_service_that_dies_while_starting_is_told_with_its_own_words():
    record = supervise.start("demo", [sys.executable, "-c", "raise SystemExit('error: no such database')"])
    with pytest.raises(ServiceError, match="demo ended while starting: error: no such database"):
        supervise.wait_ready(record, lambda: False, 600)


def test_a_taken_port_is_named_with_its_owner_or_left_for_the_next(taken):
    with pytest.raises(ServiceError, match=rf"port {taken} is taken by .* \(pid {os.getpid()}\)"):
        supervise.choose_port(taken, strict=True)
    port, why = supervise.choose_port(taken, strict=False)
    assert port > taken
    assert why.endswith(f"using {port}")


def test_a_service_whose_port_was_taken_while_it_started_gets_the_next_unless_the_user_chose(taken):
    """The choice fell when the port was free: what listens there now is this test."""
    code = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"

    def demo(port: int) -> list[str]:
        return [sys.executable, "-c", code, str(port)]

    late, said = supervise.start("demo", demo(taken), port=taken), []
    with pytest.raises(PortTaken, match=rf"demo: port {taken} was taken meanwhile by .* \(pid {os.getpid()}\)"):
        local._once_ready(Service("demo", demo, usual_port=taken), late, said.append, taken)
    moved = local._once_ready(Service("demo", demo, usual_port=taken), late, said.append, None)
    assert moved.port > taken and supervise.listens(moved)
    assert said[-1].endswith(f"starting at {moved.address}")
    supervise.stop(moved)


def test_up_on_a_taken_port_is_one_line_and_leaves_nothing_running(taken):
    done = subprocess.run(
        [LOCKSTEP, "up", "--prefect-port", str(taken), "--mlflow-port", str(taken)], capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lockstep: port {taken} is taken by ")
    assert Record.all() == []


def test_two_at_once_do_not_meet(home):
    import fcntl

    (home / "services").mkdir()
    with open(home / "services" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([LOCKSTEP, "down"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "another `lockstep up` or `down` is at work" in done.stderr


def test_killed_services_come_back_where_they_were_and_down_leaves_nothing(home):
    """kill -9 of server, worker and MLflow; `up` again; `down` ends all of them, and only them."""
    assert subprocess.run([LOCKSTEP, "up"], capture_output=True).returncode == 0
    before = {record.name: record for record in Record.all()}
    assert set(before) == {"mlflow", "prefect", "worker"}
    again = subprocess.run([LOCKSTEP, "up"], capture_output=True, text=True)
    assert again.stderr.count("already running") == 3
    assert {record.name: record for record in Record.all()} == before

    for record in before.values():
        os.kill(record.pid, signal.SIGKILL)
    up = subprocess.run([LOCKSTEP, "up"], capture_output=True, text=True)
    assert up.returncode == 0, up.stderr
    after = {record.name: record for record in Record.all()}
    assert {n: r.port for n, r in after.items()} == {n: r.port for n, r in before.items()}
    assert all(after[name].pid != before[name].pid for name in before)

    doctor = subprocess.run([LOCKSTEP, "doctor"], capture_output=True, text=True)
    for name in before:
        assert re.search(rf"^ok   {name} +answers", doctor.stdout, re.M)
    status = subprocess.run([LOCKSTEP, "status", "--json"], capture_output=True, text=True)
    assert all(service["answers"] for service in json.loads(status.stdout)["services"].values())

    members = [process for record in after.values() for process in supervise.family(record)]
    assert subprocess.run([LOCKSTEP, "down"], capture_output=True).returncode == 0
    assert not [p for p in members if p.is_running() and not ended(p.pid)]
    assert Record.all() == []
