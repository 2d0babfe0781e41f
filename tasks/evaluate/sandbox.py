"""Runs code that a model wrote, in a process of its own with hard limits.

The process starts with an empty environment in an empty folder and cannot exceed its limits of CPU time, memory, file
size and open files. Where the kernel lets it have namespaces of its own, it has no network and whatever it starts dies
with it. It still reads what its user may read: evaluate untrusted models as a user who may read nothing of value.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache

WALL_S = 60  # for what sleeps; a busy machine takes a while for what does not
LIMITS = {"RLIMIT_CPU": 5, "RLIMIT_AS": 1 << 30, "RLIMIT_FSIZE": 1 << 20, "RLIMIT_NOFILE": 32, "RLIMIT_CORE": 0}

# Limits are set by the child itself: a hook between fork and exec can hang in a process that has threads.
_RUN = f"""
import resource, sys
for name, limit in {LIMITS}.items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
exec(compile(sys.stdin.read(), "answer", "exec"), {{"__name__": "__main__"}})
"""


def passes(source: str) -> bool:
    """Whether the Python program `source` reaches its end, without an error, within the limits.

    Reaching the end is told apart from an early exit by a word that only the last line knows.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*_namespaces(), sys.executable, "-I", "-c", _RUN],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(f"{source}\nprint({word!r}, flush=True)\n".encode(), WALL_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group is gone when all its members have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode == 0 and output.endswith(f"{word}\n".encode())


@cache
def _namespaces() -> tuple[str, ...]:
    command = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if allowed else ()
