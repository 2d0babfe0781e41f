"""`lockstep loop`, again and again."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

from outcomes import Outcome

LOCKSTEP = Path(sys.executable).with_name("lockstep")
NAME = "soak"
LOOP = ["loop", "--preset", "tiny", "--set", f"target.name={NAME}", "--set", "target.source=random:qwen3"]
LOOK_S = 0.1


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
        """The last line it said, shortened."""
        return shorten(self._said[-1], 100) if self._said else "starting"

    def well(self) -> bool:
        """Whether it ended well. Waits until it has ended."""
        self._process.wait()
        self._reader.join()
        return self._process.returncode == 0

    def end(self) -> None:
        """End it where it still runs."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)

    def words(self) -> str:
        """The end of what it said."""
        return "\n".join(self._said)

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.strip():
                self._said.append(line.strip())


class Loops:
    """One loop after the other, always one at work.

    outcomes: of the kills so far. quiet_since: when the last one was over. trips: loops begun, without continuations.
    last: whether no other shall begin.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.outcomes: list[Outcome] = []
        self.quiet_since = 0.0
        self.trips = 1
        self.last = False
        self.loop = Loop()
        self._say = say

    def tend(self) -> None:
        """Begin the next loop when one has ended, or continue the one that did not end well.

        Raises AssertionError when that has not ended well once more since the last kill.
        """
        if not self.loop.ended or (self.last and self.loop.well()):
            return
        if self.loop.well():
            self.trips += 1
        else:
            kill = self.outcomes[-1] if self.outcomes else None
            assert kill and not kill.ended, self.loop.words()
            kill.ended = self.loop.last
            self._say(f"     the loop ended: `{kill.ended}`; the same command continues it")
        self.loop = Loop()

    def until(self, true: Callable[[], object], timeout_s: float) -> bool:
        """Tend them until `true()`; whether it became so in time."""
        deadline = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline:
                return False
            self.tend()
            time.sleep(LOOK_S)
        return True
