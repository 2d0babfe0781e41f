"""The process that plays episodes: one JSON object a line in, one a line out. It ends when its standard input closes.

First line in: `{"environments": [...], "model": folder, "system_prompt": text or null, "room": tokens, "timeout_s":
s}`; out `{}` when they are loaded, else `{"error": ...}`. Then in: `{"id": n, "environment": label, "index": n,
"engine": handle, "temperature": x, "seed": n, "budget": tokens}`, any number at once; out, in any order,
`{"id": n, ...}` with what `play` returns.
"""

import asyncio
import json
import math
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.rl.environments.base import BadEnvironment
from tasks.rl.environments.chat import Chat
from tasks.rl.playing import CONFIGS

LONGEST_LINE = 2**24


class Player:
    """The environments of one process while they serve; an async context manager."""

    def __init__(self, hello: dict[str, Any]):
        from transformers import AutoTokenizer

        from tasks.rl.environments.played import Verifiers
        from tasks.rl.environments.rollout_client import RolloutClient

        self._chat = Chat(AutoTokenizer.from_pretrained(hello["model"]), hello["system_prompt"])
        self._client = RolloutClient(self._chat)
        self._room, self._timeout_s, self._model = hello["room"], hello["timeout_s"], hello["model"]
        self._sources = {c.title: Verifiers(c, 0) for c in CONFIGS.validate_python(hello["environments"])}
        self._environments: dict[str, Any] = {}
        self._engines: dict[EngineHandle, EngineClient] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Player":
        from verifiers.v1.utils.loaders import load_environment

        from tasks.rl.environments.rollout_client import Interceptor

        for label, source in self._sources.items():
            environment = load_environment(source.environment)
            await self._stack.enter_async_context(environment.serving())
            environment._interception = await self._stack.enter_async_context(Interceptor(self._client))
            self._environments[label] = environment
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """One episode of a task: what its agent saw and sampled, with its reward or what went wrong (`error`). `gone`:
        the engine was lost, the episode may be played on another."""
        from verifiers.v1.clients import ModelContext, TrainClientConfig

        from tasks.rl.environments.rollout_client import Recording

        engine = await self._engine(EngineHandle.model_validate(request["engine"]))
        recordings: dict[str, tuple[Any, Recording]] = {}

        def recorded(trace: Any) -> None:
            recording = Recording(engine, request["temperature"], request["budget"], self._room, request["seed"])
            recordings[trace.id] = trace, recording
            self._client.record(trace.id, recording)

        context = ModelContext(self._model, TrainClientConfig(api_key_var="LOCKSTEP_NO_KEY"))
        label = request["environment"]
        try:
            async with asyncio.timeout(self._timeout_s):
                task = self._sources[label].task(request["index"])
                episode = await self._environments[label].run_episode(task, context, on_trace=recorded)
        except TimeoutError:
            return {"error": f"the episode was not over within {self._timeout_s:g} s"}
        finally:
            for trace_id in recordings:
                self._client.forget(trace_id)
        lost = next((r.gone for _, r in recordings.values() if r.gone), None)
        if lost:
            return {"gone": str(lost)}
        learners = [pair for pair in recordings.values() if pair[0] in episode.traces and pair[0].agent.trainable]
        if len(learners) != 1:
            why = episode.errors[-1].message if episode.errors else f"it has {len(learners)} agents that can be trained"
            return {"error": f"the episode cannot be trained on: {why}".replace("\n", " ")}
        return self._result(*learners[0], episode)

    def _result(self, trace: Any, recording: Any, episode: Any) -> dict[str, Any]:
        failure = (trace.errors or episode.errors or [None])[-1] if not episode.ok else None
        error = f"{failure.type}: {failure.message}".replace("\n", " ") if failure else ""
        if not error and not (math.isfinite(trace.reward) and 0 <= trace.reward <= 1):
            error = f"a reward must lie in [0, 1], not {trace.reward}"
        if not recording.token_ids:
            return {"error": error or "the agent said nothing"}
        return {
            "prompt_ids": recording.prompt_ids,
            "token_ids": recording.token_ids,
            "logprobs": [x if math.isfinite(x) else None for x in recording.logprobs],
            "versions": recording.versions,
            "finish_reason": recording.finish_reason,
            "text": self._chat.text(recording.token_ids),
            "turns": recording.turns,
            "rewritten": recording.rewritten,
            "reward": None if error else trace.reward,
            "error": error,
        }

    async def _engine(self, handle: EngineHandle) -> EngineClient:
        if handle not in self._engines:
            client = EngineClient(handle)
            self._engines[handle] = client
            await self._stack.enter_async_context(client)
        return self._engines[handle]


async def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an environment prints must not be taken for a reply
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task] = set()

    async def answer(player: Player, request: dict[str, Any]) -> None:
        try:
            said = await player.play(request)
        except Exception as error:  # an environment is the user's code: what it raises costs this episode, and is told
            said = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")}
        replies.write(json.dumps({"id": request["id"]} | said) + "\n")

    try:
        player = Player(json.loads(await reader.readline()))
    except BadEnvironment as error:
        replies.write(json.dumps({"error": str(error)}) + "\n")
        return
    async with player:
        replies.write("{}\n")
        while line := await reader.readline():
            task = asyncio.ensure_future(answer(player, json.loads(line)))
            running.add(task)
            task.add_done_callback(running.discard)
    os._exit(0)  # the owner is gone, even if an episode hangs


if __name__ == "__main__":
    asyncio.run(_serve())
