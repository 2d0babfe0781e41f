"""Engines on a GPU: one that is forked computes what an executed one does."""

import pytest
import torch

from infra.engine.client import EngineClient
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")


@pytest.mark.parametrize("role", [Role.eval, Role.rollout])
def test_a_forked_engine_answers_as_an_executed_one(tiny_llama, tiny_engine_config, tmp_path, run, role):
    spec = EngineSpec(model=tiny_llama, role=role, config=tiny_engine_config)

    async def answer(engine):
        async with EngineClient(engine.handle()) as client:
            return await client.generate(list(range(100, 140)), max_new_tokens=32, temperature=0.0, ignore_eos=True)

    with start(spec, tmp_path, fork=False) as engine:
        executed = run(answer(engine))
    with start(spec, tmp_path, fork=True) as engine:
        forked = run(answer(engine))
    assert forked.token_ids == executed.token_ids
    assert forked.logprobs == pytest.approx(executed.logprobs, abs=1e-4)
