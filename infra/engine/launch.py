"""Start and stop engines."""

import errno
import http.client
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from infra.engine import captures, flags
from infra.engine.errors import EngineError
from infra.engine.failure import last_line, root_cause
from infra.engine.nursery import Nursery
from infra.engine.pin import accelerated
from infra.engine.spec import EngineHandle, EngineSpec

Progress = Callable[[str], None]
PROGRESS_S = 5.0

_nursery: Nursery | None = None
_nursery_lock = threading.Lock()


class Engine:
    """A running engine and the pipe its life hangs on: when this process ends by any means, so does the engine."""

    def __init__(
        self, spec: EngineSpec, key: str, address: tuple[str, int], log: Path, lifeline: int, status: int
    ) -> None:
        self.spec, self.key, self.address, self.log = spec, key, address, log
        self._lifeline: int | None = lifeline
        self._status = open(status, "rb", buffering=0)
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
        return EngineHandle(url=self.url, key=self.key, model=self.spec.model_name, role=self.spec.role)

    def alive(self) -> bool:
        """Whether the engine still runs. Does not block."""
        return self._exit_code is None and not select.select([self._status], [], [], 0)[0]

    def wait(self) -> int:
        """Wait until the last process of the engine is gone; the API server's exit code, negative for a signal."""
        with self._lock:
            if self._exit_code is None:
                self._exit_code = int(self._status.readline() or -signal.SIGKILL)  # empty: the guardian was killed
                self._status.close()
        return self._exit_code

    def stop(self) -> None:
        """End every process of the engine and wait until the last one is gone. May be called again."""
        self._let_go()
        self.wait()

    def _let_go(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def start(spec: EngineSpec, log_dir: Path | None = None, progress: Progress | None = None) -> Engine:
    """Start an engine and wait until it has answered `/health` and generated one token.

    log_dir: where the engine's log is kept; a folder of the system's temporary one by default.
    progress: called with a line about every five seconds.
    Raises EngineError with the engine's own root cause when it dies, or when it is not ready within
    `engine.start_timeout_s`.
    """
    _check_model(spec.model)
    log_dir = Path(log_dir or tempfile.mkdtemp(prefix="lockstep-engine-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    if spec.capture:
        spec.capture.folder.mkdir(parents=True, exist_ok=True)
    key = secrets.token_urlsafe(32)
    with _bind(spec.host, spec.port) as listening:
        port = listening.getsockname()[1]
        log = log_dir / f"{spec.role}-{port}.log"
        engine = _launch(spec, key, listening, log)
    try:
        _wait_until_ready(engine, progress or (lambda line: None))
    except BaseException:
        engine.stop()
        raise
    return engine


def warm_up(log_dir: Path | None = None) -> None:
    """Begin to import vLLM in the background, so that the first engine of this process starts sooner."""
    if not accelerated():
        _the_nursery(Path(log_dir or tempfile.mkdtemp(prefix="lockstep-engine-")))


def _launch(spec: EngineSpec, key: str, listening: socket.socket, log: Path) -> Engine:
    arguments, env = flags.arguments(spec), flags.environment(spec, key)
    address = listening.getsockname()
    arguments.append(f"--port={address[1]}")
    lifeline_read, lifeline_write = os.pipe()
    status_read, status_write = os.pipe()
    theirs = [listening.fileno(), lifeline_read, status_write]
    with log.open("w") as out:
        if accelerated():
            command = [sys.executable, "-u", "-m", "infra.engine.lifeline", str(lifeline_read), str(status_write)]
            command += [sys.executable, "-u", "-m", "infra.engine.server", str(listening.fileno()), *arguments]
            subprocess.Popen(command, env=env, pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        else:
            _the_nursery(log.parent).fork(arguments, env, flags.threads(spec), [out.fileno(), *theirs])
    os.close(lifeline_read)
    os.close(status_write)
    return Engine(spec, key, address, log, lifeline_write, status_read)


def _the_nursery(log_dir: Path) -> Nursery:
    global _nursery
    with _nursery_lock:
        if _nursery is None or not _nursery.alive():
            log_dir.mkdir(parents=True, exist_ok=True)
            _nursery = Nursery(log_dir / f"nursery-{os.getpid()}.log")
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


def _wait_until_ready(engine: Engine, progress: Progress) -> None:
    prompt = {"model": engine.spec.model_name, "prompt": [0], "max_tokens": 1, "temperature": 0}
    deadline = time.monotonic() + engine.spec.config.start_timeout_s
    _ask(engine, "GET", "/health", None, deadline, progress)
    answer = _ask(engine, "POST", "/v1/completions", prompt, deadline, progress)
    if engine.spec.capture:
        captures.discard(Path(answer["kv_transfer_params"]["hidden_states_path"]))


def _ask(engine: Engine, method: str, path: str, body: dict | None, deadline: float, progress: Progress) -> dict:
    """One request. The port has been listening since before vLLM was loaded, so the answer comes when it is ready."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(*engine.address)
    headers = {"Authorization": f"Bearer {engine.key}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body=json.dumps(body) if body else None, headers=headers)
        while not select.select([connection.sock], [], [], PROGRESS_S)[0]:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the {engine.spec.role} engine was not ready after {engine.spec.config.start_timeout_s:.0f} s: "
                    f"raise engine.start_timeout_s, or read its log {engine.log}"
                )
            waited = time.monotonic() - started
            progress(f"{engine.spec.role} engine starting, {waited:.0f} s: {last_line(engine.log)}")
        answer = connection.getresponse()
        text = answer.read()
    except ConnectionError:  # nobody holds the port any more
        code = engine.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        cause = root_cause(engine.log)
        raise EngineError(f"the {engine.spec.role} engine {how}: {cause} (log: {engine.log})") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise EngineError(
            f"the {engine.spec.role} engine refused its first request: {text.decode()} (log: {engine.log})"
        )
    return json.loads(text) if text else {}
