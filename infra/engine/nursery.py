"""A process that has imported vLLM and forks engines: they start without importing anything again.

One nursery for a process and those that it tells its address: it lives as long as anyone is connected to it. Its socket
is an abstract one, which vanishes with it; both ends refuse another user's process. On GPUs it imports what an engine
would but must leave CUDA alone, which no fork survives.
"""

import gc
import importlib
import json
import multiprocessing
import os
import secrets
import select
import signal
import socket
import struct
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
from infra.engine.pin import accelerated
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
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
)
PRELOAD_ON_CPU = ("vllm.v1.attention.backends.cpu_attn", "vllm.v1.worker.cpu_worker")
PRELOAD_ON_GPUS = (
    "vllm.device_allocator.cumem",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
)


class Nursery:
    """A connection to a nursery. Several threads may use it."""

    def __init__(self, log: Path, address: str | None = None) -> None:
        """Connect to the nursery at `address`, or else, or where that is gone, to a new one, which begins to import at
        once. Does not wait for it.

        log: file for what a new nursery itself prints.
        """
        self._lock = threading.Lock()
        self._control, self.address = (address and _join(address)) or _start(log)
        self._log = Path(json.loads(self.address)["log"])
        os.register_at_fork(after_in_child=self._control.close)

    def alive(self) -> bool:
        """Whether the nursery may still answer."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:  # hung up on, here or there
            return False

    def fork(
        self, flags: list[str], env: dict[str, str], threads: int, fds: list[int], tick: Callable[[], None]
    ) -> None:
        """Fork one engine.

        fds: log file, listening socket, lifeline (reading end), status pipe (writing end).
        tick: called every few seconds while vLLM is still being imported; may raise to give up.
        Raises EngineError when the nursery has died.
        """
        request = {"flags": flags, "env": env, "threads": threads, "cwd": os.getcwd()}
        request |= {"cores": list(os.sched_getaffinity(0))}
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
                while not select.select([self._control], [], [], PROGRESS_S)[0]:
                    tick()
                if self._control.recv(16) == b"forked":
                    return
            except ConnectionError:
                pass  # told below, with the nursery's own words
            except BaseException:
                self._control.close()  # it will answer a question that nobody waits for any more
                raise
        raise EngineError(f"vLLM cannot be imported: {root_cause(self._log)} (log: {self._log})")


def _join(address: str) -> tuple[socket.socket, str] | None:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        control.connect("\0" + json.loads(address)["socket"])
        if _peer(control) == os.getuid():
            return control, address
    except OSError:
        pass  # it is gone
    control.close()
    return None


def _start(log: Path) -> tuple[socket.socket, str]:
    name = f"lockstep-nursery-{secrets.token_hex(16)}"
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, log.open("w") as out:
        listening.bind("\0" + name)
        listening.listen(128)
        control.connect("\0" + name)
        subprocess.Popen(
            [sys.executable, "-u", "-m", "infra.engine.nursery", str(listening.fileno())],
            env=caches() | os.environ | SLEEPING_THREADS | {"OMP_NUM_THREADS": "1"},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # an interrupt from the keyboard is for whoever asks for engines
        )
    return control, json.dumps({"socket": name, "log": str(log.absolute())})


def _peer(connection: socket.socket) -> int:
    """User id of the process at the other end."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid


def main() -> None:
    """`python -m infra.engine.nursery LISTENING_FD`: import, then fork engines until the last process has hung up."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # what is imported stays: looking through it again and again took a quarter of the imports' time
    for module in PRELOAD + (PRELOAD_ON_GPUS if accelerated() else PRELOAD_ON_CPU):
        importlib.import_module(module)
    # vLLM collects garbage six times while it starts: half a second each over all that was imported, if not frozen.
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guardians report through their pipes; nobody waits for them
    connections: list[socket.socket] = []
    while True:
        for ready in select.select([listening, *connections], [], [])[0]:
            if ready is listening:
                connection, _ = listening.accept()
                if _peer(connection) == os.getuid():
                    connections.append(connection)
                else:
                    connection.close()
            elif not _answer(ready, [listening, *connections]):
                connections.remove(ready)
                ready.close()
        if not connections and not select.select([listening], [], [], 0)[0]:
            return


def _answer(connection: socket.socket, open_here: list[socket.socket]) -> bool:
    """Fork the engine that is asked for; whether anyone is there still."""
    try:
        request, fds, _, _ = socket.recv_fds(connection, 1 << 20, 4)
        if not request:
            return False
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in open_here:
                inherited.close()
            _become_guardian(json.loads(request), *fds)
        for fd in fds:
            os.close(fd)
        connection.send(b"forked")
    except ConnectionError:  # gave up while it was waiting: the engine ends with its lifeline
        return False
    return True


def _become_guardian(request: dict, log: int, listening: int, lifeline: int, status: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    tempfile.tempdir = None  # the nursery's own, if it has asked for one

    def serve() -> None:
        from infra.engine.server import serve

        _fork_to_inspect()
        if accelerated():
            # vLLM's command would spawn EngineCore, which imports all of this once more: 14 s of 25 on an H200's host.
            # Where CUDA is already in use, vLLM spawns it all the same.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        else:
            _fork_instead_of_spawning(request["threads"])
        serve(request["flags"], socket.socket(fileno=listening))

    guard(serve, lifeline, status, listening)


def _fork_to_inspect() -> None:
    """vLLM looks at a model's class, the first time on a machine, in a process that imports all of vLLM for it: 17 s on
    an H200's host. A fork of this process has it imported, and is as far from using CUDA in this one."""
    from vllm.model_executor.models import registry

    executed, context = registry._run_in_subprocess, multiprocessing.get_context("fork")

    def forked(function):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda: sender.send(function()))
        process.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:  # it failed: the other one says why, or can where a fork cannot
            return executed(function)
        finally:
            process.join()

    registry._run_in_subprocess = forked


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
