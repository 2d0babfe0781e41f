"""Episodes of verifiers environments, played in a process of their own: one that raises, hangs or dies costs itself."""

import asyncio
import itertools
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from infra.config.rl import VerifiersEnvironment
from infra.engine.errors import EngineGone
from infra.engine.spec import EngineHandle
from tasks.rl.environments.base import BadEnvironment, Problem

CONFIGS = TypeAdapter(list[VerifiersEnvironment])
START_TIMEOUT_S = 180.0
GRACE_S = 15.0
"""An episode that is over its time by this much has stopped its process, which is replaced."""


class Players:
    """Async context manager around one process that plays any number of episodes at once.

    model: folder of the target, for its tokenizer. room: longest conversation, tokens. timeout_s: of one episode.
    Entering raises BadEnvironment when an environment cannot be loaded. Without environments no process is started.
    """

    def __init__(
        self,
        configs: Sequence[VerifiersEnvironment],
        model: Path,
        *,
        system_prompt: str | None,
        room: int,
        timeout_s: float,
    ):
        self.labels = {config.title for config in configs}
        hello = {"environments": CONFIGS.dump_python(list(configs), mode="json"), "model": str(model), "room": room}
        self._hello = json.dumps(hello | {"system_prompt": system_prompt, "timeout_s": timeout_s})
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task | None = None
        self._waiting: dict[int, asyncio.Future] = {}
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> "Players":
        if self.labels:
            await self._start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stop()

    async def play(
        self, problem: Problem, engine: EngineHandle, *, temperature: float, seed: int, budget: int
    ) -> dict[str, Any]:
        """What `Player.play` returns, log-probs -inf where the engine's were not finite.

        budget: tokens that the agent may sample. Raises EngineGone when the engine was lost meanwhile.
        """
        async with self._starting:
            if self._process is None:
                await self._start()
        number = next(self._numbers)
        request = {"id": number, "environment": problem.environment, "index": problem.index, "seed": seed}
        request |= {"engine": engine.model_dump(mode="json"), "temperature": temperature, "budget": budget}
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            said = await asyncio.wait_for(self._waiting[number], self._timeout_s + GRACE_S)
        except TimeoutError:
            await self._stop()
            return {"error": f"the environment stopped its process for {self._timeout_s + GRACE_S:g} s"}
        finally:
            self._waiting.pop(number, None)
        if "gone" in said:
            raise EngineGone(said["gone"])
        if "logprobs" in said:
            said["logprobs"] = [-math.inf if x is None else x for x in said["logprobs"]]
        return said

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tasks.rl.environments.player_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**26,
            env=os.environ | {"PYTHONPATH": _importable()},
        )
        self._process.stdin.write(self._hello.encode() + b"\n")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            await self._stop()
            raise BadEnvironment(
                f"the process of the environments was not ready within {START_TIMEOUT_S:g} s"
            ) from None
        reply = json.loads(line or b'{"error": "the process of the environments died while it loaded them"}')
        if "error" in reply:
            await self._stop()
            raise BadEnvironment(reply["error"])
        self._reader = asyncio.ensure_future(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        while line := await process.stdout.readline():
            said = json.loads(line)
            if (future := self._waiting.get(said["id"])) and not future.done():
                future.set_result(said)
        if self._process is process:
            self._process = None
        self._lose("the process of the environments died")

    def _lose(self, why: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": why})

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if self._reader:
            self._reader.cancel()
        self._lose("another episode stopped the process of the environments")
        if process:
            if process.returncode is None:
                process.kill()
            await process.wait()


def _importable() -> str:
    """What is imported here, and from the folder the run was started in, for tool servers that start in folders of
    their own."""
    return os.pathsep.join(map(os.path.abspath, [p for p in [*sys.path, os.getcwd()] if p]))
