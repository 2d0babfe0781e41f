"""Seeded requests on the CPU engine: their tokens do not depend on how the engine splits their prompts over steps."""

import asyncio

import pytest
import torch

from infra.engine.client import EngineClient
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role
from tasks.rl.rollout import sample_seed

PROMPT, REQUESTS, BUDGET = 48, 12, 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="generators on GPUs can be set back")
def test_a_seeded_prompt_may_take_several_engine_steps(tiny_llama, tiny_engine_config, tmp_path):
    """Fails without `rewind_generators_of_unfinished_prompts`: 12 prompts of 48 tokens do not fit into steps of 128."""
    config = tiny_engine_config.model_copy(update={"max_batched_tokens": BUDGET})
    prompts = [[100 + 7 * n + k for k in range(PROMPT)] for n in range(REQUESTS)]

    async def generate(client: EngineClient, number: int) -> list[int]:
        seed = sample_seed(0, 0, number, 0)
        done = await client.generate(prompts[number], max_new_tokens=6, temperature=1.0, seed=seed)
        return done.token_ids

    async def compare(handle) -> None:
        async with EngineClient(handle) as client:
            alone = [await generate(client, n) for n in range(REQUESTS)]
            await client.reset_prefix_cache()
            assert await asyncio.gather(*(generate(client, n) for n in range(REQUESTS))) == alone

    with start(EngineSpec(model=tiny_llama, role=Role.rollout, config=config), tmp_path) as engine:
        asyncio.run(compare(engine.handle()))
