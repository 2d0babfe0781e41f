"""Problems that an RL environment judges: answered here as plain prompts, scored where the environments are."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle


class Problem(BaseModel):
    """Number `index` of an environment's problems. prompt: the conversation that asks, token ids. max_new_tokens:
    longest answer."""

    model_config = ConfigDict(frozen=True)

    environment: str
    index: int
    prompt: list[int]
    max_new_tokens: int


async def answer(handle: EngineHandle, problems: Sequence[Problem], tokenizer: Path, *, concurrency: int) -> list[str]:
    """The most likely answer (temperature 0) of the engine behind `handle` to each problem, special tokens left out.

    tokenizer: the model's folder. concurrency: requests in flight.
    """
    from transformers import AutoTokenizer

    words, slots = AutoTokenizer.from_pretrained(tokenizer), asyncio.Semaphore(concurrency)

    async def one(client: EngineClient, problem: Problem) -> str:
        async with slots:
            done = await client.generate(
                problem.prompt, max_new_tokens=problem.max_new_tokens, temperature=0.0, logprobs=False
            )
        return words.decode(done.token_ids, skip_special_tokens=True)

    async with EngineClient(handle) as client:
        return await asyncio.gather(*(one(client, problem) for problem in problems))
