"""`lockstep doctor`: what this machine lacks, and what to do."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from urllib.request import urlopen

import psutil
import typer
from packaging.requirements import Requirement

from flows.cli.exits import FAILED, Stop
from infra.config.memory import GIB
from infra.engine.errors import EngineError
from infra.engine.pin import accelerated, engine_pin, hardware
from infra.services import catalog, profile, supervise
from infra.services.home import home
from infra.services.record import Record, ServiceError
from infra.store.base import StoreError
from infra.store.open import open_store

MEMORY_GIB, DISK_GIB, SHARED_GIB = 10, 10, 1.5  # what the preset smol needs
GPU_FREE = 0.9  # share of a GPU's memory that nobody else may be using
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass
class Finding:
    """One checked thing. cure: what to do when it is not well."""

    what: str
    well: bool
    state: str
    cure: str = ""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(doctor)


def doctor() -> None:
    """Check versions, GPUs, memory, disk, shared memory, ports, the store, services and clock; say what to do."""
    findings = list(examine())
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{'ok  ' if finding.well else 'FAIL'} {finding.what:<{width}}  {finding.state}")
        if not finding.well:
            print(f"     {'':<{width}}  -> {finding.cure}")
    bad = [finding for finding in findings if not finding.well]
    if bad:
        raise Stop(f"{len(bad)} of {len(findings)} checks failed", code=FAILED)


def examine() -> Iterator[Finding]:
    """Every check, cheapest first."""
    python = sys.version_info[:2]
    known = (3, 11) <= python < (3, 13)
    yield Finding("python", known, ".".join(map(str, python)), "use Python 3.11 or 3.12")
    yield _pins()
    yield _engine()
    yield from _gpus()
    yield _memory()
    yield _disk()
    shared = shutil.disk_usage("/dev/shm").free / GIB
    cure = f"weights travel through it: mount it with {SHARED_GIB} GiB or more (`docker run --shm-size`)"
    yield Finding("shared memory", shared >= SHARED_GIB, f"{shared:.1f} GiB free in /dev/shm", cure)
    yield _ports()
    yield _store()
    yield from _services()


def _pins() -> Finding:
    try:
        wanted = [Requirement(line) for line in requires("lockstep") or []]
    except PackageNotFoundError:
        return Finding("packages", False, "lockstep is not installed", "run `make install`")
    wrong = []
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = "absent"
        if found == "absent" or not requirement.specifier.contains(found):
            wrong.append(f"{requirement} (here: {found})")
    return Finding("packages", not wrong, ", ".join(wrong) or "as pinned", "run `make install`")


def _engine() -> Finding:
    try:
        return Finding("engine", True, f"{engine_pin()} on {hardware()}")
    except EngineError as error:
        return Finding("engine", False, str(error), "run `make install`")
    except (OSError, subprocess.CalledProcessError) as error:
        return Finding(
            "engine", False, f"{engine_pin()}, but no GPU answers ({error})", "install `.[cpu]`, or the driver"
        )


def _gpus() -> Iterator[Finding]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return  # none, or none that works, which the engine's own line says where it needs one
    if not accelerated():
        state = f"{len(lines)} here, but engines of this install run on CPUs"
        yield Finding("GPUs", False, state, "`make install VARIANT=gpu` uses them")
        return
    for number, line in enumerate(lines):
        name, total, used, driver = (part.strip() for part in line.split(","))
        free = (float(total) - float(used)) / 1024
        state = f"{name}, {free:.0f} of {float(total) / 1024:.0f} GiB free, driver {driver}"
        cure = "`nvidia-smi` names what else uses it: end that, or lower engine.gpu_memory_fraction"
        yield Finding(f"GPU {number}", free >= GPU_FREE * float(total) / 1024, state, cure)


def _memory() -> Finding:
    free, where = psutil.virtual_memory().available, "free"
    try:
        limit, used = ((CONTROL_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except FileNotFoundError:
        limit = used = "max"
    if limit != "max" and int(limit) - int(used) < free:
        free, where = int(limit) - int(used), f"left of this container's {int(limit) / GIB:.1f}"
    cure = f"the preset smol needs {MEMORY_GIB} GiB: end something, or use the preset tiny"
    return Finding("memory", free >= MEMORY_GIB * GIB, f"{free / GIB:.1f} GiB {where}", cure)


def _disk() -> Finding:
    cure = "free some (`lockstep gc` says what could go), or set LOCKSTEP_HOME to a place with more"
    try:
        home().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Finding("disk", False, f"{home()}: {error.strerror}", "set LOCKSTEP_HOME to a place that can be written")
    disk = shutil.disk_usage(home()).free / GIB
    return Finding("disk", disk >= DISK_GIB, f"{disk:.1f} GiB free in {home()}", cure)


def _ports() -> Finding:
    """A port that a stranger holds is no fault: the next free one is taken instead."""
    names = ("prefect", "mlflow") + (("postgres", "seaweedfs") if profile.current() == "team" else ())
    chosen = {}
    for name in names:
        if record := Record.read(name):
            chosen[name] = f"{record.port}"
        else:
            port, why = supervise.choose_port(catalog.PORTS[name], strict=False)
            chosen[name] = f"{port}" + (f" ({why.split(';')[0]})" if why else "")
    return Finding("ports", True, ", ".join(f"{name} {port}" for name, port in chosen.items()))


def _store() -> Finding:
    try:
        store = open_store()
        store.probe()
    except ServiceError:
        return Finding("store", False, "the object storage of profile team is not running", "run `lockstep up`")
    except StoreError as error:
        return Finding("store", False, str(error), "make it writable, or set LOCKSTEP_STORE to another place")
    return Finding("store", True, f"{store.url} can be written")


def _services() -> Iterator[Finding]:
    records = Record.all()
    if not records:
        yield Finding("services", False, "none were started here", "run `lockstep up`")
    for record in records:
        well = catalog.healthy(record)
        state = f"{'answers' if well else 'does not answer'} {record.address}".strip()
        yield Finding(record.name, well, state, f"see {record.log}, then run `lockstep up`")
        if well and record.name == "prefect":
            yield _clock(record.address)


def _clock(address: str) -> Finding:
    with urlopen(f"{address}/api/health") as response:
        skew = abs(parsedate_to_datetime(response.headers["date"]).timestamp() - time.time())
    return Finding("clock", skew < 5, f"{skew:.0f} s apart from the Prefect server's", "synchronise the clocks")
