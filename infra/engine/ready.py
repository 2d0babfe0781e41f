"""When an engine is ready, and why it is not."""

import http.client
import json
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from infra.engine.errors import EngineError
from infra.engine.failure import doing, root_cause
from infra.engine.spec import EngineSpec

if TYPE_CHECKING:
    from infra.engine.launch import Engine

Progress = Callable[[str], None]
PROGRESS_S = 5.0


class Patience:
    """Tells how long a start has taken, and ends it when that is too long."""

    def __init__(self, spec: EngineSpec, progress: Progress | None) -> None:
        self._spec, self._progress = spec, progress
        self._started = time.monotonic()

    def tick(self, what: str) -> None:
        """Report `what` the engine is doing. Raises EngineError after `engine.start_timeout_s`."""
        waited, timeout = time.monotonic() - self._started, self._spec.config.start_timeout_s
        if waited > timeout:
            raise EngineError(
                f"the {self._spec.role} engine was not ready after {timeout:.0f} s ({what}): "
                f"raise engine.start_timeout_s, or see what else this machine is doing"
            )
        if self._progress:
            self._progress(f"{self._spec.role} engine starting, {waited:.0f} s: {what}")


def wait_until_ready(engine: "Engine", patience: Patience) -> None:
    """Return when `engine` has answered `/health` and generated one token.

    Raises EngineError with the engine's own root cause when it dies, or when patience ends.
    """
    prompt = {"model": engine.spec.model_name, "prompt": [0], "max_tokens": 1, "temperature": 0}
    _ask(engine, "GET", "/health", None, patience)
    _ask(engine, "POST", "/v1/completions", prompt, patience)


def _ask(engine: "Engine", method: str, path: str, body: dict | None, patience: Patience) -> None:
    """One request. The port has been listening since before vLLM was loaded, so the answer comes when it is ready."""
    connection = http.client.HTTPConnection(*engine.address)
    headers = {"Authorization": f"Bearer {engine.key}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body=json.dumps(body) if body else None, headers=headers)
        while not select.select([connection.sock], [], [], PROGRESS_S)[0]:
            patience.tick(doing(engine.log))
        answer = connection.getresponse()
        text = answer.read().decode()
    except ConnectionError:  # nobody holds the port any more
        code = engine.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        cause = root_cause(engine.log)
        raise EngineError(f"the {engine.spec.role} engine {how}: {cause} (log: {engine.log})") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise EngineError(f"the {engine.spec.role} engine refused its first request: {text} (log: {engine.log})")
