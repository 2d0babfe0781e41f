"""The guardian of one engine: a small process that ends all of the engine's processes when its owner goes away.

    owner ... guardian (own session) -- API server (own process group) -- EngineCore -- workers

The guardian waits on two things: the lifeline, a pipe whose writing end only the owner holds, and the API server. When
either ends, whatever the reason, nothing of the engine survives it. It reports on the status pipe: the server's pid
when it starts, its exit code when the last process is gone.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from infra.engine.flags import SCRATCH_VARIABLE, SHARED_MEMORY_VARIABLE

SHUTDOWN_S = 8.0
"""How long vLLM's own shutdown may take."""
ORPHANS_S = 1.0
"""How long processes may outlive the API server before they are killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def guard(serve: Callable[[], object], lifeline: int, status: int, listening: int) -> NoReturn:
    """Run `serve` in a child process; end it and all that it started when `lifeline` closes or it exits.

    lifeline, status: pipe ends (reading, writing), as in the module's description.
    listening: the server's socket, which the guardian must not keep open.
    """
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans of the engine become children of the guardian, so that it can tell when the last one is gone.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = os.fork()
    if server == 0:
        os.setpgid(0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.close(lifeline)
        os.close(status)
        _run(serve)
    os.close(listening)
    os.write(status, f"{server}\n".encode())
    pidfd = os.pidfd_open(server)
    ended, _, _ = select.select([lifeline, pidfd], [], [])
    if pidfd not in ended:
        os.kill(server, signal.SIGTERM)
        select.select([pidfd], [], [], SHUTDOWN_S)
    code = _end(server)
    for segment in Path("/dev/shm").glob(os.environ[SHARED_MEMORY_VARIABLE] + "*"):
        segment.unlink(missing_ok=True)
    shutil.rmtree(os.environ[SCRATCH_VARIABLE], ignore_errors=True)
    with contextlib.suppress(BrokenPipeError):  # the owner is gone
        os.write(status, f"{code}\n".encode())
    os._exit(0)


def _run(serve: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        serve()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(server: int) -> int:
    """Kill what is left and wait until it is gone; the server's exit code, negative for a signal."""
    code = 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGTERM)
    deadline = time.monotonic() + ORPHANS_S
    while True:
        try:
            pid, waited = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == server:
            code = os.waitstatus_to_exitcode(waited)
        elif pid == 0:
            if time.monotonic() > deadline:
                _kill_children()
            time.sleep(0.01)


def _kill_children() -> None:
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)  # ours until reaped: the pid cannot have been reused


def main() -> NoReturn:
    """`python -m infra.engine.lifeline LIFELINE_FD STATUS_FD SOCKET_FD COMMAND...`: guard a command."""
    lifeline, status, listening, *command = sys.argv[1:]
    guard(lambda: os.execvp(command[0], command), int(lifeline), int(status), int(listening))


if __name__ == "__main__":
    main()
