"""Start and stop engines."""

import errno
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from infra.engine import flags
from infra.engine.errors import EngineError
from infra.engine.failure import passing, unforkable
from infra.engine.nursery import Nursery
from infra.engine.pin import accelerated
from infra.engine.ready import Patience, Progress, wait_until_ready
from infra.engine.spec import EngineHandle, EngineSpec
from infra.services.home import home

ATTEMPTS = 3  # to start an engine that fails for a reason that passes

_nursery: Nursery | None = None
_nursery_lock = threading.Lock()


class Engine:
    """A running engine and the pipe its life hangs on: when this process ends by any means, so does the engine."""

    def __init__(
        self,
        spec: EngineSpec,
        key: str,
        address: tuple[str, int],
        log: Path,
        lifeline: int,
        status: int,
        guardian: subprocess.Popen | None,
    ) -> None:
        self.spec, self.key, self.address, self.log = spec, key, address, log
        self._lifeline: int | None = lifeline
        self._status = os.fdopen(status, "rb", buffering=0)
        self._guardian = guardian  # our child, when it was executed
        self._lock = threading.Lock()
        self._exit_code: int | None = None
        os.register_at_fork(after_in_child=self._let_go)
        self.pid = int(self._status.readline())
        """Process id of the API server."""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def handle(self) -> EngineHandle:
        """How other processes reach this engine."""
        return EngineHandle(
            url=self.url,
            key=self.key,
            model=self.spec.model_name,
            role=self.spec.role,
            accelerated=accelerated(),
        )

    def alive(self) -> bool:
        """Whether the engine still runs. Does not block."""
        return self._exit_code is None and not select.select([self._status], [], [], 0)[0]

    def wait(self) -> int:
        """Wait until the last process of the engine is gone; the API server's exit code, negative for a signal."""
        with self._lock:
            if self._exit_code is None:
                self._exit_code = int(self._status.readline() or -signal.SIGKILL)  # empty: the guardian was killed
                self._status.close()
                if self._guardian:
                    self._guardian.wait()
        return self._exit_code

    def stop(self) -> None:
        """End every process of the engine and wait until the last one is gone. May be called again."""
        self._let_go()
        self.wait()

    def _let_go(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def start(
    spec: EngineSpec, log_dir: Path | None = None, progress: Progress | None = None, fork: bool | None = None
) -> Engine:
    """Start an engine and wait until it has answered `/health` and generated one token.

    log_dir: where the engine's log is kept, `logs/engines` below Lockstep's home by default.
    progress: called with a line every few seconds.
    fork: take the engine from a process that has imported vLLM already (`infra.engine.nursery`), or execute a fresh
        one; by default the former, but for matched engines on GPUs, whose kernels vLLM chooses as it is imported. One
        that cannot use CUDA because it was forked is executed.
    Raises EngineError with the engine's own root cause when it dies, or when it is not ready within
    `engine.start_timeout_s`.
    """
    _check_model(spec.model)
    if spec.speculation and spec.speculation.model:
        _check_model(spec.speculation.model)
    log_dir = Path(log_dir or _logs())
    log_dir.mkdir(parents=True, exist_ok=True)
    if spec.capture:
        spec.capture.folder.mkdir(parents=True, exist_ok=True)
    patience, fork = Patience(spec, progress), not (spec.matched and accelerated()) if fork is None else fork
    for attempts_left in reversed(range(ATTEMPTS)):
        with _bind(spec.host, spec.port) as listening:
            engine = _launch(spec, listening, log_dir, patience, fork=fork)
        try:
            wait_until_ready(engine, patience)
            break
        except BaseException as error:
            engine.stop()
            executing = fork and unforkable(str(error))
            if not (attempts_left and isinstance(error, EngineError) and (executing or passing(str(error)))):
                raise
            fork = fork and not executing
    return engine


def warm_up(log_dir: Path | None = None, nursery: str | None = None) -> str:
    """Begin to import vLLM in the background, so that the first engine of this process starts sooner.

    nursery: what another process's `warm_up` returned: engines are taken from there, while it is there.
    Returns the address of the nursery.
    """
    return _the_nursery(Path(log_dir or _logs()), nursery).address


def _logs() -> Path:
    return home() / "logs" / "engines"


def _launch(spec: EngineSpec, listening: socket.socket, log_dir: Path, patience: Patience, fork: bool) -> Engine:
    address = listening.getsockname()
    key = spec.key.get_secret_value() if spec.key else secrets.token_urlsafe(32)
    scratch = flags.make_scratch()
    arguments, env = [*flags.arguments(spec), f"--port={address[1]}"], flags.environment(spec, key, scratch)
    log = log_dir / f"{spec.role}-{address[1]}.log"
    lifeline_read, lifeline_write = os.pipe()
    status_read, status_write = os.pipe()
    theirs = [listening.fileno(), lifeline_read, status_write]
    guardian = None
    try:
        with log.open("w") as out:
            if fork:
                fds = [out.fileno(), *theirs]
                _the_nursery(log_dir).fork(
                    arguments, env, flags.threads(spec), fds, lambda: patience.tick("importing vLLM")
                )
            else:
                python = [sys.executable, "-u", "-m"]
                sock = str(listening.fileno())
                command = [*python, "infra.engine.lifeline", str(lifeline_read), str(status_write), sock]
                command += [*python, "infra.engine.server", sock, *arguments]
                guardian = subprocess.Popen(
                    command, env=env, pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
    except BaseException:
        os.close(lifeline_write)
        os.close(status_read)
        shutil.rmtree(scratch)
        raise
    finally:
        os.close(lifeline_read)
        os.close(status_write)
    return Engine(spec, key, address, log, lifeline_write, status_read, guardian)


def _the_nursery(log_dir: Path, address: str | None = None) -> Nursery:
    global _nursery
    with _nursery_lock:
        if _nursery is None or not _nursery.alive():
            log_dir.mkdir(parents=True, exist_ok=True)
            _nursery = Nursery(log_dir / f"nursery-{os.getpid()}.log", address)
        return _nursery


def _forget_nursery() -> None:
    global _nursery
    _nursery = None


os.register_at_fork(after_in_child=_forget_nursery)


def _check_model(model: Path) -> None:
    if not (model / "config.json").is_file():
        what = "has no config.json" if model.is_dir() else "is not a folder"
        raise EngineError(f"{model} {what}: an engine needs a model folder in Hugging Face format")


def _bind(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # Another process that binds with SO_REUSEADDR is refused only once the socket listens.
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise EngineError(f"port {port} on {host} is in use: choose another, or 0 for a free one") from error
        raise EngineError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose an address of this machine"
        ) from error
    return listening
