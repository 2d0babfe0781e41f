"""Scorers in processes of their own: one that raises, hangs or dies costs one rollout."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from infra.config import rl as settings
from tasks.rl.environments.base import BadEnvironment

CONFIGS = TypeAdapter(list[settings.ReasoningGym | settings.JsonlEnvironment])
START_TIMEOUT_S = 120.0


class ScorerError(RuntimeError):
    """A scorer that has never worked."""


@dataclass(frozen=True)
class Score:
    """reward: in [0, 1], None when the scorer failed. error: why, one line, empty when it did not."""

    reward: float | None
    error: str = ""


class ScorerPool:
    """Async context manager around scorer processes.

    processes: how many. timeout_s: limit of one score, seconds; the process of one that takes longer is killed and
    replaced. give_up_after: an environment whose first so many scores all fail is given up. Without environments no
    process is started.
    Entering raises BadEnvironment when an environment or its scorer cannot be loaded.
    """

    def __init__(
        self,
        configs: Sequence[settings.ReasoningGym | settings.JsonlEnvironment],
        seed: int,
        *,
        processes: int = 2,
        timeout_s: float = 10.0,
        give_up_after: int = 8,
    ):
        self._hello = json.dumps({"environments": CONFIGS.dump_python(list(configs), mode="json"), "seed": seed})
        self._scorers = {config.title: config.scorer for config in configs}
        self._processes, self._timeout_s, self._give_up_after = processes if configs else 0, timeout_s, give_up_after
        self._free: asyncio.Queue[asyncio.subprocess.Process | BadEnvironment] = asyncio.Queue()
        self._all: set[asyncio.subprocess.Process] = set()
        self._replacing: set[asyncio.Task] = set()
        self._worked: set[str] = set()
        self._failures = dict.fromkeys(self._scorers, 0)

    async def __aenter__(self) -> "ScorerPool":
        try:
            await asyncio.gather(*(self._start() for _ in range(self._processes)))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for process in list(self._all):
            await self._kill(process)

    async def score(self, environment: str, index: int, answer: str) -> Score:
        """Reward of `answer` to problem `index` of `environment`.

        Raises ScorerError once `give_up_after` scores of an environment have failed and none has worked.
        """
        score = await self._attempt(environment, index, answer)
        if score.reward is not None:
            self._worked.add(environment)
        elif environment not in self._worked:
            self._failures[environment] += 1
            if self._failures[environment] >= self._give_up_after:
                raise ScorerError(
                    f"scorer {self._scorers[environment]} of environment {environment} failed on all of its first "
                    f"{self._give_up_after} answers, the last time with: {score.error}; correct it and start again"
                )
        return score

    async def _attempt(self, environment: str, index: int, answer: str) -> Score:
        process = await self._free.get()
        if isinstance(process, BadEnvironment):
            self._free.put_nowait(process)  # for the others that wait
            raise process
        request = json.dumps({"environment": environment, "index": index, "answer": answer}).encode() + b"\n"
        try:
            process.stdin.write(request)
            await process.stdin.drain()
            line = await asyncio.wait_for(process.stdout.readline(), self._timeout_s)
        except TimeoutError:
            self._replace(process)
            return Score(None, f"no score within {self._timeout_s:g} s")
        except ConnectionError:
            line = b""
        except BaseException:  # cancelled: the process may still answer, so it cannot be used again
            self._replace(process)
            raise
        if not line:
            self._replace(process)
            return Score(None, "the scorer's process died")
        self._free.put_nowait(process)
        reply = json.loads(line)
        return Score(reply["score"]) if "score" in reply else Score(None, reply["error"])

    async def _start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tasks.rl.scorer_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**22,
        )
        self._all.add(process)
        process.stdin.write(self._hello.encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise BadEnvironment(f"a scorer process was not ready within {START_TIMEOUT_S:g} s") from None
        reply = json.loads(line or b'{"error": "a scorer process died while it loaded"}')
        if "error" in reply:
            raise BadEnvironment(reply["error"])
        self._free.put_nowait(process)

    def _replace(self, process: asyncio.subprocess.Process) -> None:
        async def replace() -> None:
            await self._kill(process)
            try:
                await self._start()
            except BadEnvironment as error:
                self._free.put_nowait(error)

        task = asyncio.get_running_loop().create_task(replace())
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        if process.returncode is None:
            process.kill()
        await process.wait()
