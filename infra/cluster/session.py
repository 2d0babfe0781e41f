"""One Ray session per process: engines and workers are started through it and end with it."""

import atexit
import gc
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from infra.cluster.connection import ADDRESS_VARIABLE, Connection
from infra.cluster.placement import PlacementError, Resources
from infra.config.confidential import is_secret_variable
from infra.engine import launch
from infra.engine.errors import EngineError
from infra.engine.flags import SLEEPING_THREADS
from infra.engine.pin import accelerated
from infra.engine.spec import EngineHandle, EngineSpec
from infra.services.home import home

_POLL_S = 2.0
_FREE_S = 60.0
_INHERITED = (
    *("LOCKSTEP_", "HF_", "VLLM_", "TRANSFORMERS_", "MLFLOW_", "PREFECT_", "PYTHONPATH"),
    *("NCCL_", "NVSHMEM_", "TORCH_", "PYTORCH_"),  # what a machine's links and allocators need or must not use
)

_current: "Session | None" = None
_lock = threading.Lock()


def session() -> "Session":
    """The session of this process. Ray starts with its first use, or with `warm_up`."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = Session()
        return _current


class Session:
    """Use `session()`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._connection: Connection | None = None
        self._lock = threading.RLock()
        self._hosts: list[Any] = []
        self._shared_host: Any = None
        self._engines: dict[str, tuple[Any, str]] = {}

    def warm_up(self) -> None:
        """Start Ray and the import of vLLM in the background, so that the first engine is there sooner."""
        threading.Thread(target=self._warm_up, daemon=True).start()

    def resources(self) -> Resources:
        """Devices of the whole cluster."""
        total = self._ray().cluster_resources()
        return Resources(total.get("CPU", 0.0), total.get("GPU", 0.0))

    @contextmanager
    def engine(
        self,
        spec: EngineSpec,
        *,
        reserve: Resources | None = None,
        log_dir: Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Iterator[EngineHandle]:
        """An engine for as long as the context is open.

        reserve: devices held for it (`placement.place`); by default its GPUs, and nothing on CPU, where engines share
            the cores with whatever else runs.
        log_dir: folder of its log, `home()/logs/engines` by default.
        progress: called with a line every few seconds while it starts.
        Raises EngineError with the engine's own root cause, PlacementError when its devices cannot be had.
        """
        reserve = reserve or Resources(0, spec.config.tensor_parallel if accelerated() else 0)
        group, host = self._host(reserve, log_dir)
        name = uuid.uuid4().hex
        try:
            handle = self._start(host, name, spec, progress)
            self._engines[handle.url] = (host, name)
            try:
                yield handle
            finally:
                del self._engines[handle.url]
        finally:
            self._let_go(host, name, group)

    def alive(self, handle: EngineHandle) -> bool:
        """Whether an engine of this session still runs."""
        host, name = self._engines[handle.url]
        try:
            return self.result(host.alive.remote(name))
        except self._ray().exceptions.RayActorError:  # its engines have died with it
            self._lost(host)
            return False

    def actor(
        self,
        cls: type,
        *args: Any,
        cpus: float = 1,
        gpus: float = 0,
        threads: int | None = None,
        aside: int = 0,
        **kwargs: Any,
    ) -> Any:
        """An instance of `cls` in a process of its own: call `actor.method.remote(...)`, get results by `result`.

        cpus, gpus: devices held for it.
        threads: torch and OpenMP threads; as many as whole CPUs are reserved by default.
        aside: calls made through `method.options(concurrency_group="aside")` that may run at once beside the others,
            of which one runs at a time.
        It ends with this process's last reference to it, with the session, or with this process, and its devices are
        free again. It is never restarted here.
        Raises PlacementError when its devices cannot be had.
        """
        ray = self._ray()
        env = self._environment() | SLEEPING_THREADS | {"OMP_NUM_THREADS": str(threads or max(1, int(cpus)))}
        reserve = Resources(cpus, gpus)
        group = self._reserve(reserve)
        remote = ray.remote(concurrency_groups={"aside": aside})(cls) if aside else ray.remote(cls)
        remote = remote.options(runtime_env={"env_vars": env}, **_options(reserve, group))
        handle = remote.remote(*args, **kwargs)
        if group is not None:
            weakref.finalize(handle, self._free, group).atexit = False
        return handle

    def result(self, reference: Any, timeout_s: float | None = None) -> Any:
        """What a remote call returned. Raises what it raised, as it was, and GetTimeoutError after `timeout_s`."""
        ray = self._ray()
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def results(self, references: list[Any]) -> list[Any]:
        """What remote calls returned, in their order, once all have. The first error is raised as soon as it is there:
        the other calls may be waiting for the one it came from."""
        pending = list(references)
        while pending:
            (done, *_), pending = self._ray().wait(pending)
            self.result(done)
        return [self.result(reference) for reference in references]

    def close(self) -> None:
        """End every engine and worker, and Ray itself if this process started it. May be called again."""
        with self._lock:
            if self._connection is None or self.pid != os.getpid():
                return
            import ray

            for host in self._hosts:
                ray.kill(host)
            self._hosts, self._shared_host = [], None
            self._connection.close()
            self._connection = None

    def _ray(self):
        import ray

        with self._lock:
            if self._connection is None:
                self._connection = Connection()
                atexit.register(self.close)  # after Ray has registered its own, so that this one runs first
        return ray

    def _environment(self) -> dict[str, str]:
        return {} if self._connection.local else handed_on()

    def _warm_up(self) -> None:
        with suppress(PlacementError):  # no cluster answers: told to whoever needs it
            if accelerated():
                _nursery()
                self._ray()
            else:
                self._host(Resources(), None)

    def _host(self, reserve: Resources, log_dir: Path | None) -> tuple[Any, Any]:
        """(placement group or None, host). Engines without a reservation share one host, which forks them; on GPUs each
        has its own, which Ray gives its devices."""
        nursery = _nursery()
        ray = self._ray()
        from infra.cluster.engines import EngineHost

        shared = log_dir is None and reserve == Resources()
        with self._lock:
            if shared and self._shared_host is not None:
                return None, self._shared_host
            group = self._reserve(reserve)
            options = {"max_concurrency": 16, "runtime_env": {"env_vars": self._environment()}}
            host = (
                ray.remote(EngineHost)
                .options(**options, **_options(reserve, group))
                .remote(log_dir or home() / "logs" / "engines", nursery)
            )
            self._hosts.append(host)
            if shared:
                self._shared_host = host
        return group, host

    def _start(self, host: Any, name: str, spec: EngineSpec, progress: Callable[[str], None] | None) -> EngineHandle:
        ray = self._ray()
        starting = host.start.remote(name, spec)
        told = ""
        try:
            while not ray.wait([starting], timeout=_POLL_S)[0]:
                line = self.result(host.line.remote(name))
                if progress and line != told:
                    progress(line)
                    told = line
            return self.result(starting)
        except ray.exceptions.RayActorError as error:
            self._lost(host)
            raise EngineError(f"the process that starts engines has died: {error}") from error

    def _let_go(self, host: Any, name: str, group: Any) -> None:
        ray = self._ray()
        with suppress(ray.exceptions.RayActorError):  # its engines have died with it
            self.result(host.stop.remote(name))
        if host is not self._shared_host and host in self._hosts:
            self._hosts.remove(host)
            ray.kill(host)
        self._free(group)

    def _lost(self, host: Any) -> None:
        """A host that has died: the next engine gets another."""
        with self._lock:
            self._hosts = [other for other in self._hosts if other is not host]
            self._shared_host = None if host is self._shared_host else self._shared_host

    def _free(self, group: Any) -> None:
        if group is not None and self._connection is not None:
            self._ray().util.remove_placement_group(group)

    def _reserve(self, need: Resources) -> Any:
        """A placement group of one bundle, or None when nothing is reserved."""
        if need == Resources():
            return None
        ray = self._ray()
        gc.collect()  # workers that nothing but a cycle of references holds, such as an exception's, give back theirs
        have, free = self.resources(), ray.available_resources()
        if need.cpus > have.cpus or need.gpus > have.gpus:
            raise PlacementError(f"a worker needs {need}, the whole cluster has {have}")
        bundle = {kind: amount for kind, amount in (("CPU", need.cpus), ("GPU", need.gpus)) if amount}
        group = ray.util.placement_group([bundle], strategy="STRICT_PACK")
        if not group.wait(_FREE_S):
            ray.util.remove_placement_group(group)
            have = Resources(free.get("CPU", 0.0), free.get("GPU", 0.0))
            raise PlacementError(f"a worker needs {need}, but only {have} are free: other workers hold the rest")
        return group


def _nursery() -> str | None:
    """Of this process, where its engines run on this machine: they are forked from it, whichever host owns them."""
    return None if os.environ.get(ADDRESS_VARIABLE) else launch.warm_up()


def handed_on() -> dict[str, str]:
    """Variables that a worker on another machine, or of a Ray that was started elsewhere, would not have. Secret ones
    are left out: Ray writes these into its logs and shows them on its dashboard."""
    return {n: v for n, v in os.environ.items() if n.startswith(_INHERITED) and not is_secret_variable(n)}


def _options(reserve: Resources, group: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": reserve.cpus, "num_gpus": reserve.gpus}
    if group is not None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
    return options
