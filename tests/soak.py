"""Kill -9 at random points of tiny loops under the profile `team`: what was registered or committed stays, every link
holds, and the loop ends after all.

    make soak KILLS=30 SEED=1
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import httpx
import psutil

from infra.lineage.check import Problem, check
from infra.lineage.lineage import Lineage
from infra.lineage.versions import KINDS, registered_model
from infra.services import catalog, supervise
from infra.services.record import Record
from infra.services.supervise import ServiceError, wait_ready
from infra.store.open import open_store

LOCKSTEP = Path(sys.executable).with_name("lockstep")
NAME = "soak"
LOOP = ["loop", "--preset", "tiny", "--set", f"target.name={NAME}", "--set", "target.source=random:qwen3"]
SERVICES = ("prefect", "worker", "mlflow", "postgres", "seaweedfs")
TARGETS = (*SERVICES, "flow", "engine", "trainer")
LONGEST_S = 40.0  # from the start of a loop, or its continuation, to the kill
PATIENCE_S = 240.0
ENDED = "ended well"
LOOK_S = 0.1


@dataclass(frozen=True)
class Kill:
    """target: one of TARGETS. after_s: seconds of the loop's work before the kill, or until there is such a process."""

    target: str
    after_s: float


@dataclass(frozen=True)
class Outcome:
    """What came of a kill.

    point: what the loop said last. then: `goes on`, or how the loop ended and was continued by the same command.
    back_s: seconds until every service answered. lost: what was there before and is not any more, and broken links.
    """

    kill: Kill
    point: str
    then: str
    back_s: float
    lost: list[str]


def plan(seed: int, count: int, targets: Sequence[str] = TARGETS) -> list[Kill]:
    """`count` kills, each target as often as any other, in random order at random times."""
    dice = random.Random(seed)
    order = [target for _ in range(-(-count // len(targets))) for target in dice.sample(targets, len(targets))]
    return [Kill(target, dice.uniform(1.0, LONGEST_S)) for target in order[:count]]


class Loop:
    """`lockstep loop`, started and followed."""

    def __init__(self) -> None:
        self._said: deque[str] = deque(maxlen=50)
        self._process = subprocess.Popen(
            [LOCKSTEP, *LOOP], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.began = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last(self) -> str:
        """The last line it said."""
        return self._said[-1] if self._said else "starting"

    def result(self, timeout_s: float) -> int:
        """Its exit code. Killed when it takes longer."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join()
        return self._process.returncode

    def words(self) -> str:
        """The end of what it said."""
        return "\n".join(self._said)

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.strip():
                self._said.append(line.strip())


def soak(kills: Sequence[Kill], say: Callable[[str], None]) -> list[Outcome]:
    """Carry out `kills` one after the other while loops run, then let the last loop end.

    The services must be up. Raises AssertionError when a loop does not end well in the end, or registered twice.
    """
    outcomes, loop, trips = [], Loop(), 1
    for number, kill in enumerate(kills, 1):
        loop, victim, ended = _wait_for(kill, loop)
        trips += ended
        before, point = _held(), loop.last
        victim.send_signal(signal.SIGKILL)
        began = time.monotonic()
        _wait_back(victim)
        back_s = time.monotonic() - began
        loop, then = _settle(loop)
        trips += then == ENDED
        outcome = Outcome(kill, point, then, back_s, _lost(before))
        outcomes.append(outcome)
        say(f"{number:>3}  {kill.target:<9}  {outcome.back_s:5.1f} s  {then}; lost: {outcome.lost or 'nothing'}")
    _finish(loop)
    targets = Lineage().versions(registered_model(NAME, "target"))
    assert len(targets) == 1 + trips, f"{trips} loops registered {[version.label for version in targets]}"
    return outcomes


def _wait_for(kill: Kill, loop: Loop) -> tuple[Loop, psutil.Process, int]:
    """The loop at work and the process to kill, `kill.after_s` after it began; how many loops have ended before."""
    deadline, ended = time.monotonic() + 2 * PATIENCE_S, 0
    while time.monotonic() < deadline:
        if loop.ended:
            assert loop.result(0) == 0, loop.words()
            loop, ended = Loop(), ended + 1
        elif time.monotonic() - loop.began >= kill.after_s and (found := _find(kill.target)):
            return loop, found, ended
        time.sleep(LOOK_S)
    raise AssertionError(f"there was no {kill.target} to kill; the loop said: {loop.words()}")


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
        wait_ready(keeper, lambda: all(map(catalog.healthy, Record.all())), PATIENCE_S)


def _settle(loop: Loop) -> tuple[Loop, str]:
    """The loop as it goes on, or its continuation when its flow's process is gone."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if loop.ended:
            break
        if _find("flow"):
            return loop, "goes on"
        time.sleep(LOOK_S)
    if loop.result(10) == 0:
        return Loop(), ENDED
    return Loop(), f"continued after `{shorten(loop.last, 60)}`"


def _held() -> dict[str, str]:
    """Digest of everything that is registered or committed, by name."""
    lineage = Lineage()
    models = [registered_model(NAME, kind) for kind in KINDS]
    versions = {version.label: version.artifact.digest for model in models for version in lineage.versions(model)}
    return versions | {ref.name: ref.digest for ref in open_store().list()}


def _lost(before: dict[str, str]) -> list[str]:
    after = _held()
    lost = [f"{name} {digest}" for name, digest in before.items() if after.get(name) != digest]
    deadline = time.monotonic() + PATIENCE_S
    problems: list[Problem] = check(Lineage(), open_store(), NAME)
    while problems and time.monotonic() < deadline:  # the loop goes on: a version may be half linked for a moment
        time.sleep(1)
        problems = check(Lineage(), open_store(), NAME)
    return lost + [f"{problem.version}: {problem.what}" for problem in problems]


def _finish(loop: Loop) -> None:
    """Let the loop end; one that lost its flow is continued once."""
    if loop.result(2 * PATIENCE_S) != 0:
        words = loop.words()
        again = Loop()
        assert again.result(2 * PATIENCE_S) == 0, f"{words}\n\nand again:\n{again.words()}"
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
    models = Path(os.environ.get("LOCKSTEP_HOME") or Path(__file__).parents[1] / ".lockstep")
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        for shared in ("models", "packages"):
            (models / shared).mkdir(parents=True, exist_ok=True)
            (Path(folder) / shared).symlink_to((models / shared).absolute())
        os.environ["LOCKSTEP_HOME"] = folder
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "LOCKSTEP_STORE"):
            os.environ.pop(name, None)
        try:
            subprocess.run([LOCKSTEP, "up", "--profile", "team"], check=True)
            outcomes = soak(plan(given.seed, given.kills), lambda line: print(line, flush=True))
        except (ServiceError, subprocess.CalledProcessError) as error:
            sys.exit(str(error))
        finally:
            subprocess.run([LOCKSTEP, "down"], check=False)
    lost = [item for outcome in outcomes for item in outcome.lost]
    print(f"{len(outcomes)} kills, lost: {lost or 'nothing'}; the last loop ended well")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
