"""`lockstep doctor`: what this machine lacks, and what to do."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, requires, version
from urllib.request import urlopen

import psutil
import typer
from packaging.requirements import Requirement

from flows.cli.exits import FAILED, Stop
from infra.config.memory import GIB
from infra.engine.errors import EngineError
from infra.engine.pin import engine_pin, hardware
from infra.services import local
from infra.services.home import home
from infra.services.record import Record

MEMORY_GIB, DISK_GIB, SHARED_GIB = 10, 10, 1.5  # what the preset smol needs


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
    """Check versions, memory, disk, shared memory, services, clock and the store; say what to do."""
    findings = list(examine())
    for finding in findings:
        cure = "" if finding.well else f" -> {finding.cure}"
        print(f"{'ok  ' if finding.well else 'FAIL'} {finding.what}: {finding.state}{cure}")
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
    free = psutil.virtual_memory().available / GIB
    yield Finding("memory", free >= MEMORY_GIB, f"{free:.1f} GiB free", f"the preset smol needs {MEMORY_GIB} GiB")
    home().mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(home()).free / GIB
    yield Finding("disk", disk >= DISK_GIB, f"{disk:.1f} GiB free in {home()}", "free some, or set LOCKSTEP_HOME")
    shared = shutil.disk_usage("/dev/shm").free / GIB
    yield Finding("shared memory", shared >= SHARED_GIB, f"{shared:.1f} GiB free in /dev/shm", "mount it larger")
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


def _store() -> Finding:
    try:
        with tempfile.TemporaryFile(dir=home()) as file:
            file.write(b"x")
    except OSError as error:
        return Finding("store", False, f"{home()}: {error.strerror}", "make it writable, or set LOCKSTEP_HOME")
    return Finding("store", True, f"{home()} can be written")


def _services() -> Iterator[Finding]:
    records = Record.all()
    if not records:
        yield Finding("services", False, "none were started here", "run `lockstep up`")
    for record in records:
        well = local.healthy(record)
        state = f"{'answers' if well else 'does not answer'} {record.address}".strip()
        yield Finding(record.name, well, state, f"see {record.log}, then run `lockstep up`")
        if well and record.name == "prefect":
            yield _clock(record.address)


def _clock(address: str) -> Finding:
    with urlopen(f"{address}/api/health") as response:
        skew = abs(parsedate_to_datetime(response.headers["date"]).timestamp() - time.time())
    return Finding("clock", skew < 5, f"{skew:.0f} s apart from the Prefect server's", "synchronise the clocks")
