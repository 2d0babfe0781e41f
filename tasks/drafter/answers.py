"""The target's own answers to prompts: what the drafter learns to propose."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.drafter.traffic import Prompt


class Answering(BaseModel):
    """How the target answers. concurrency: requests in flight. seed: with a prompt's own tokens it seeds its answer."""

    model_config = ConfigDict(frozen=True)

    max_new_tokens: int
    temperature: float
    seed: int
    concurrency: int

    def key(self, prompt: Prompt) -> str:
        """Names a prompt and how it is answered."""
        asked = [prompt.token_ids, self.max_new_tokens, self.temperature, self.seed]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


class Answered(BaseModel):
    """token_ids: prompt and answer. finish_reason: `stop` or `length`."""

    key: str
    domain: str
    token_ids: list[int]
    num_prompt_tokens: int
    finish_reason: str


async def answer(
    handle: EngineHandle,
    prompts: Sequence[Prompt],
    answering: Answering,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Answered]:
    """The target's answers to `prompts`, in their order. on_progress: called with (answers done, of all)."""
    slots, done = asyncio.Semaphore(answering.concurrency), 0

    async def one(client: EngineClient, prompt: Prompt) -> Answered:
        nonlocal done
        key = answering.key(prompt)
        async with slots:
            generation = await client.generate(
                prompt.token_ids,
                max_new_tokens=answering.max_new_tokens,
                temperature=answering.temperature,
                seed=int(key[:8], 16),
            )
        done += 1
        on_progress(done, len(prompts))
        return Answered(
            key=key,
            domain=prompt.domain,
            token_ids=prompt.token_ids + generation.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            finish_reason=generation.finish_reason,
        )

    async with EngineClient(handle) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))
