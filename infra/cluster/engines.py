"""The Ray actor that owns the engines of one node."""

import threading
from pathlib import Path

from infra.engine import launch
from infra.engine.spec import EngineHandle, EngineSpec


class EngineHost:
    """Starts engines. They end with it, whatever ends it.

    Called from several threads: an engine that starts does not hold up the others.
    """

    def __init__(self, log_dir: Path, nursery: str | None) -> None:
        """nursery: of the process that asks for engines, if it has one; by default this one starts its own, before the
        first engine is asked for (`launch.warm_up`)."""
        self._log_dir = log_dir
        self._engines: dict[str, launch.Engine] = {}
        self._lines: dict[str, str] = {}
        self._stopped: set[str] = set()
        self._lock = threading.Lock()
        launch.warm_up(log_dir, nursery)

    def start(self, name: str, spec: EngineSpec) -> EngineHandle:
        """Start an engine under a name of the caller's choice and wait until it is ready.

        Raises EngineError with the engine's own root cause.
        """
        engine = launch.start(spec, self._log_dir, lambda line: self._lines.update({name: line}))
        with self._lock:
            unwanted = name in self._stopped
            if not unwanted:
                self._engines[name] = engine
        if unwanted:  # its caller gave up meanwhile
            engine.stop()
        return engine.handle()

    def line(self, name: str) -> str:
        """The last progress line of an engine that is starting."""
        return self._lines.get(name, "")

    def alive(self, name: str) -> bool:
        """Whether the engine still runs."""
        engine = self._engines.get(name)
        return engine is not None and engine.alive()

    def stop(self, name: str) -> None:
        """End the engine, also one that is still starting. May be called again."""
        with self._lock:
            self._stopped.add(name)
            engine = self._engines.pop(name, None)
        self._lines.pop(name, None)
        if engine:
            engine.stop()
