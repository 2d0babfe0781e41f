"""Kill -9 at random points of tiny loops under the profile `team`: what was registered or committed stays, every link
holds, and the loop ends after all.

    make soak KILLS=30 SEED=1
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from loops import LOCKSTEP, NAME, Loops
from outcomes import SERVICES, Kill, Outcome, plan, table

from infra.lineage.check import Problem, check
from infra.lineage.lineage import Lineage
from infra.lineage.versions import KINDS, registered_model
from infra.services import catalog, profile, supervise
from infra.services.record import Record
from infra.services.supervise import ServiceError, wait_ready
from infra.store.open import open_store

PATIENCE_S = 240.0
SETTLE_S = 180.0  # until the loop has its flow again, or has ended


def soak(kills: Sequence[Kill], say: Callable[[str], None]) -> list[Outcome]:
    """Carry out `kills` one after the other while loops run, then let the last loop end.

    The services must be up. Raises AssertionError when a loop does not end well in the end, or registered twice.
    """
    loops = Loops(say)
    try:
        for number, kill in enumerate(kills, 1):
            outcome = _carry_out(kill, loops)
            loops.quiet_since = time.monotonic()
            lost = f"lost: {outcome.lost}" if outcome.lost else "nothing lost"
            seconds = f"back after {outcome.back_s:5.1f} s"
            say(f"{number:>3}  {kill.target:<9}  {seconds}  {outcome.then:<9}  {lost}; at `{outcome.point}`")
        _finish(loops)
    finally:
        loops.loop.end()
    targets = Lineage().versions(registered_model(NAME, "target"))
    made = len(targets) - 1  # the first is where they began
    assert made == loops.trips, f"{loops.trips} loops registered {[version.label for version in targets]}"
    return loops.outcomes


def _carry_out(kill: Kill, loops: Loops) -> Outcome:
    before, victim = _kill(kill, loops)
    outcome, loop, began = Outcome(kill, loops.loop.last), loops.loop, time.monotonic()
    loops.outcomes.append(outcome)
    _wait_back(victim)
    outcome.back_s = time.monotonic() - began
    went_on = loops.until(lambda: loops.loop is not loop or _find("flow"), SETTLE_S)
    assert went_on, f"without a flow after a kill of {kill.target}: {loop.words()}"
    outcome.lost = _lost(before, loops)
    return outcome


def _kill(kill: Kill, loops: Loops) -> tuple[dict[str, str], psutil.Process]:
    """Kill when the loop has worked for `kill.after_s`, or as soon as there is such a process then.

    Gives what was held before, and the victim.
    """
    done: list[tuple[dict[str, str], psutil.Process]] = []

    def killed() -> bool:
        worked_s = time.monotonic() - max(loops.loop.began, loops.quiet_since)
        if worked_s < kill.after_s or not _find(kill.target):
            return False
        before = _held()
        if victim := _find(kill.target):  # it may have ended meanwhile
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                done.append((before, victim))
        return bool(done)

    assert loops.until(killed, 2 * PATIENCE_S), f"there was no {kill.target} to kill: {loops.loop.words()}"
    return done[0]


def _find(target: str) -> psutil.Process | None:
    if target in SERVICES:
        record = Record.read(target)
        return psutil.Process(record.pid) if record and supervise.alive(record) else None
    worker = Record.read("worker")
    marks = {"flow": "prefect.engine", "engine": "infra.engine.nursery", "trainer": "ray::TrainerWorker"}
    found = [p for p in supervise.family(worker) if marks[target] in _command(p)] if worker else []
    if target == "engine":  # the nursery's children: API servers, engine cores and their workers
        found = [p for p in found if (parent := p.parent()) and marks[target] in _command(parent)]
    return min(found, key=lambda p: p.pid, default=None)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _wait_back(victim: psutil.Process) -> None:
    """Until every service answers again: the keeper sees to that, or `lockstep up` where there is none."""
    victim.wait(PATIENCE_S)
    keeper = Record.read("keeper")
    if keeper is None:
        subprocess.run([LOCKSTEP, "up"], check=True, capture_output=True)
    else:
        wait_ready(keeper, lambda: all(map(_works, Record.all())), PATIENCE_S)


def _works(record: Record) -> bool:
    return supervise.alive(record) and catalog.service(record.name, profile.current()).ready(record)


def _held() -> dict[str, str]:
    """Digest of everything that is registered or committed, by name."""
    lineage = Lineage()
    models = [registered_model(NAME, kind) for kind in KINDS]
    versions = {version.label: version.artifact.digest for model in models for version in lineage.versions(model)}
    return versions | {ref.name: ref.digest for ref in open_store().list()}


def _lost(before: dict[str, str], loops: Loops) -> list[str]:
    after = _held()
    lost = [f"{name} {digest}" for name, digest in before.items() if after.get(name) != digest]
    problems: list[Problem] = []

    def whole() -> bool:
        problems[:] = check(Lineage(), open_store(), NAME)
        return not problems

    loops.until(whole, PATIENCE_S)  # the loop goes on: a version may be half linked for a moment
    return lost + [f"{problem.version}: {problem.what}" for problem in problems]


def _finish(loops: Loops) -> None:
    """Let the last loop end."""
    loops.last = True
    assert loops.until(lambda: loops.loop.ended and loops.loop.well(), 4 * PATIENCE_S), loops.loop.words()
    server = Record.read("prefect")
    assert server is not None
    running = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    left = httpx.post(f"{server.address}/api/flow_runs/filter", json=running).json()
    assert not left, f"still shown as running: {[run['name'] for run in left]}"


def main() -> None:
    """Bring the profile up in a home of its own, kill, report, and take it down again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))  # not before the services are down
    models = Path(os.environ.get("LOCKSTEP_HOME") or Path(__file__).parents[2] / ".lockstep")
    folder = Path(tempfile.mkdtemp(prefix="lockstep-soak-"))
    for shared in ("models", "packages"):
        (models / shared).mkdir(parents=True, exist_ok=True)
        (folder / shared).symlink_to((models / shared).absolute())
    os.environ["LOCKSTEP_HOME"] = str(folder)
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "LOCKSTEP_STORE"):
        os.environ.pop(name, None)
    print(f"home: {folder}, kept when this fails", flush=True)
    try:
        subprocess.run([LOCKSTEP, "up", "--profile", "team"], check=True)
        outcomes = soak(plan(given.seed, given.kills), lambda line: print(line, flush=True))
    except (ServiceError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    finally:
        subprocess.run([LOCKSTEP, "down"], check=False)
    print(f"\n{table(outcomes)}\nthe last loop ended well")
    if any(outcome.lost for outcome in outcomes):
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
