"""The profile `team`: PostgreSQL and SeaweedFS below Prefect, MLflow and the store. Killed in the middle of use, every
service comes back by itself and nothing acknowledged is lost; no password is found where it does not belong."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from contents import contents

from infra.services import catalog, local, postgres, profile, seaweed, supervise
from infra.services.record import Record
from infra.services.supervise import ServiceError
from infra.store.s3_client import Access, connect

LOCKSTEP = Path(sys.executable).with_name("lockstep")
SERVICES = {"postgres", "seaweedfs", "prefect", "mlflow", "worker", "keeper"}
PLANTED = "planted-secret-3141592653"

# one artifact, one registered version and one Prefect variable after the other, each told once it is acknowledged
WRITER = """
import contextlib, json, select, sys, tempfile
from pathlib import Path
from infra.services import environment
environment.apply()
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.exceptions import ObjectAlreadyExists
from infra.lineage.lineage import Lineage
from infra.store.open import open_store

lineage, store, parent, number = Lineage(), open_store(), None, 0
with get_client(sync_client=True) as client:
    while not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "weights").write_text(f"content {number}" * 1000)
            ref = store.put(Path(folder), "target", producer="a writer")
        parent = lineage.register_target("written", ref, parent=parent, run_id="")
        with contextlib.suppress(ObjectAlreadyExists):  # the answer to an earlier attempt was lost
            client.create_variable(VariableCreate(name=f"written_{number}", value=parent.label))
        print(json.dumps([number, parent.label, ref.digest]), flush=True)
"""
READER = """
import json, sys
from infra.services import environment
environment.apply()
from prefect.variables import Variable
from infra.lineage.lineage import Lineage
from infra.store.open import open_store

lineage, store = Lineage(), open_store()
for number, label, digest in json.load(sys.stdin):
    version = lineage.get(label)
    assert version.artifact.digest == digest
    assert (store.open(version.artifact) / "weights").read_text() == f"content {number}" * 1000
    assert Variable.get(f"written_{number}") == label
print("all there")
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[pytest.MonkeyPatch]:
    """A home of its own whose team profile is up, started with keys of the user's in the environment."""
    try:
        postgres.binary("initdb")
    except ServiceError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("PREFECT_", "MLFLOW_", "AWS_")) or n == "LOCKSTEP_STORE"]:
            patch.delenv(name)
        patch.setenv("LOCKSTEP_HOME", str(tmp_path_factory.mktemp("team")))
        patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
        try:
            up = lockstep("up", "--profile", "team")
            assert up.returncode == 0, up.stderr
            yield patch
        finally:
            lockstep("down")


def lockstep(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([LOCKSTEP, *arguments], capture_output=True, text=True)


def wait_back(before: Record) -> None:
    """Until the service runs again as another process and answers."""

    def back() -> bool:
        now = Record.read(before.name)
        started = now is not None and now.pid != before.pid and supervise.alive(now)
        return started and catalog.service(now.name, "team").ready(now)

    keeper = Record.read("keeper")
    assert keeper is not None
    supervise.wait_ready(keeper, back, 600)


def kill(name: str) -> Record:
    record = Record.read(name)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    return record


def test_killed_in_the_middle_of_use_nothing_acknowledged_is_lost(machine):
    """The writer never learns of it: its clients wait until the services are back."""
    assert {record.name for record in Record.all()} == SERVICES
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    told = []

    def goes_on(count: int) -> None:
        for _ in range(count):
            line = writer.stdout.readline()
            assert line, writer.stderr.read()[-3000:]
            told.append(json.loads(line))

    goes_on(2)
    for victim in ("postgres", "seaweedfs", "prefect", "mlflow"):
        wait_back(kill(victim))
        goes_on(3)  # two may have been on their way
    everything = [kill(name) for name in ("worker", "mlflow", "prefect", "seaweedfs", "postgres")]
    for record in everything:
        wait_back(record)
    goes_on(3)
    writer.stdin.close()
    rest = writer.stdout.read()
    assert writer.wait() == 0, writer.stderr.read()[-3000:]
    told += [json.loads(line) for line in rest.splitlines()]

    kill("keeper")
    again = lockstep("up")  # without a profile: the one that is up
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("already running") == 5 and "keeper: starting" in again.stderr
    reader = subprocess.run([sys.executable, "-c", READER], input=json.dumps(told), capture_output=True, text=True)
    assert "all there" in reader.stdout, reader.stderr[-3000:]
    check = lockstep("lineage", "written", "--check")
    assert "is not registered" not in check.stdout and "damaged" not in check.stdout and "names" not in check.stdout


def test_object_storage_is_not_ready_before_it_finds_what_it_held(machine):
    """Asked once and not again, it gives each object in the moment in which it says that it works."""
    before = Record.read("seaweedfs")
    access = Access(before.address, seaweed.REGION, *seaweed.credentials())
    held = {f"held/{number}": str(number).encode() * 1000 for number in range(20)}
    once = connect(access, attempts=1)
    for name, content in held.items():
        once.put_object(Bucket=seaweed.BUCKET, Key=name, Body=content)
    wait_back(kill("seaweedfs"))
    for name, content in held.items():
        assert once.get_object(Bucket=seaweed.BUCKET, Key=name)["Body"].read() == content


def test_no_password_is_where_it_does_not_belong(machine):
    """Neither those that were made at the start nor the user's own: not in arguments, logs, databases, nor files, and
    the made ones not even in anybody's environment."""
    home = Path(os.environ["LOCKSTEP_HOME"])
    made = {line.rsplit(":", 1)[1] for line in (home / "secrets/pgpass").read_text().split()}
    made.add(json.loads((home / "secrets/s3.json").read_text())["identities"][0]["credentials"][0]["secretKey"])
    assert len(made) == 3 and all(len(word) > 40 for word in made)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (home / "secrets", *(home / "secrets").iterdir()))

    family = [process for record in Record.all() for process in supervise.family(record)]
    assert len(family) > len(SERVICES)  # with the children
    for process in family:
        arguments = "\0".join(process.cmdline())
        assert not any(word in arguments for word in (*made, PLANTED))
        assert not any(word in "\0".join(process.environ().values()) for word in made)
    words = [word.encode() for word in (*made, PLANTED)]
    found = {
        str(path)
        for path, content in contents(home)  # logs, reports, results, and PostgreSQL's and SeaweedFS's own files
        if path.parent.name != "secrets" and any(word in content for word in words)
    }
    assert not found
    said = lockstep("status").stdout + lockstep("doctor").stdout
    assert not any(word in said for word in (*made, PLANTED))


def test_another_profile_waits_until_this_one_is_down_and_its_books_are_not_mistaken(machine):
    refused = lockstep("up", "--profile", "local")
    assert refused.returncode == 1
    assert refused.stderr == "lockstep: services of profile team were started here: `lockstep down` first\n"
    members = [process for record in Record.all() for process in supervise.family(record)]
    bound = {c.laddr for process in members for c in process.net_connections("unix") if c.laddr.startswith("/tmp/")}
    assert [path for path in bound if "seaweedfs" in path]
    assert lockstep("down").returncode == 0
    assert not [path for path in bound if os.path.exists(path)]
    assert not [p for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert Record.all() == []
    for command in (("lineage", "written"), ("lineage", "written", "--check")):
        lost = lockstep(*command)
        assert lost.returncode == 1
        assert lost.stderr == "lockstep: the services of profile team are not running: start them with `lockstep up`\n"


def test_without_postgresql_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(postgres, "DEBIAN", tmp_path)
    with pytest.raises(ServiceError, match="^the profile team needs PostgreSQL, which .*apt-get install postgresql.*$"):
        local.up(print, "team")
    assert Record.all() == [] and profile.current() == "local"
