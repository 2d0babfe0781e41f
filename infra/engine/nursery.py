"""A process that has imported vLLM and forks engines: they start without importing anything again.

One nursery per owner process, started with its first engine. It lives as long as its control socket. Only for CPU: a
process that has touched CUDA cannot be forked.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from infra.engine.errors import EngineError
from infra.engine.failure import root_cause
from infra.engine.flags import SLEEPING_THREADS, caches
from infra.engine.lifeline import guard
from infra.engine.ready import PROGRESS_S

# What the API server, EngineCore and worker processes would import one after the other while they start.
PRELOAD = (
    "infra.engine.middleware",
    "infra.engine.quirks",
    "infra.engine.server",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvloop",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.rl.factories",
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.models.qwen3",
    "vllm.renderers.hf",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class Nursery:
    """The owner's side: starts the process and asks it for engines. Safe to use from several threads."""

    def __init__(self, log: Path) -> None:
        """Start importing; returns at once.

        log: file for what the nursery itself prints.
        """
        self._log = log
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("w") as out:
            command = [sys.executable, "-u", "-m", "infra.engine.nursery", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                env=caches() | os.environ | SLEEPING_THREADS | {"OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        os.register_at_fork(after_in_child=self._control.close)

    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self, flags: list[str], env: dict[str, str], threads: int, fds: list[int], tick: Callable[[], None]
    ) -> None:
        """Fork one engine.

        fds: log file, listening socket, lifeline (reading end), status pipe (writing end).
        tick: called every few seconds while vLLM is still being imported; may raise to give up.
        Raises EngineError when the nursery has died.
        """
        request = json.dumps({"flags": flags, "env": env, "threads": threads}).encode()
        with self._lock:
            try:
                socket.send_fds(self._control, [request], fds)
                while not select.select([self._control], [], [], PROGRESS_S)[0]:
                    tick()
                if self._control.recv(16) == b"forked":
                    return
            except ConnectionError:
                pass  # told below, with the nursery's own words
            except BaseException:
                self._process.kill()  # it would answer a question that nobody waits for any more
                raise
        self._process.wait()
        raise EngineError(f"vLLM cannot be imported: {root_cause(self._log)} (log: {self._log})")


def main() -> None:
    """`python -m infra.engine.nursery CONTROL_FD`: import, then fork engines until the owner hangs up."""
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # what is imported stays: looking through it again and again took a quarter of the imports' time
    for module in PRELOAD:
        importlib.import_module(module)
    # vLLM collects garbage six times while it starts: half a second each over all that was imported, if not frozen.
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guardians report through their pipes; nobody waits for them
    while True:
        request, fds, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not request:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _become_guardian(json.loads(request), *fds)
        for fd in fds:
            os.close(fd)
        control.send(b"forked")


def _become_guardian(request: dict, log: int, listening: int, lifeline: int, status: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # the nursery's own, if it has asked for one

    def serve() -> None:
        from infra.engine.server import serve

        _fork_instead_of_spawning(request["threads"])
        serve(request["flags"], socket.socket(fileno=listening))

    guard(serve, lifeline, status, listening)


def _fork_instead_of_spawning(threads: int) -> None:
    """Let vLLM's CPU platform fork EngineCore and workers too. It spawns them because OpenMP reads its environment only
    when a process is executed; so the worker, the one process that computes in parallel, is told its threads here.
    Until then everything runs on one thread: a process that forks after it has used OpenMP's pool leaves its child
    waiting for threads that do not exist."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    configure, create = CpuPlatform.check_and_update_config, CPUWorker.__init__

    def configure_then_fork(cls, vllm_config) -> None:
        configure(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    def create_with_threads(self, *args, **kwargs) -> None:
        torch.set_num_threads(threads)
        create(self, *args, **kwargs)

    CpuPlatform.check_and_update_config = classmethod(configure_then_fork)
    CPUWorker.__init__ = create_with_threads


if __name__ == "__main__":
    main()
