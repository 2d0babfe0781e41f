"""What the meter says of an engine that decodes, caches a prompt, and is then left idle."""

import asyncio
import math

import pytest

from infra.engine.client import EngineClient
from infra.engine.load import LoadMeter
from infra.engine.spec import EngineSpec, Role


def test_what_engines_did_between_two_looks(engine, tiny_llama, tiny_engine_config, run):
    handle = engine(EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)).handle()
    prompt = [1 + i % 50 for i in range(300)]  # two full blocks of the prefix cache

    async def work() -> list[dict[str, float]]:
        async with EngineClient(handle) as client, LoadMeter([client]) as meter:
            await client.reset_prefix_cache()
            await client.generate(prompt, max_new_tokens=1, temperature=0.0)
            looks = [await meter.take()]
            while True:
                with meter.working():
                    sampling = dict(max_new_tokens=200, temperature=1.0, ignore_eos=True)
                    await asyncio.gather(*(client.generate(prompt, seed=seed, **sampling) for seed in range(4)))
                looks.append(await meter.take())
                if not math.isnan(looks[-1]["kv_cache_peak"]):  # it was looked at while they ran
                    return [*looks, await meter.take()]

    read, *_, busy, idle = run(work())
    assert (read["engine_busy_s"], read["prefix_hit_rate"], read["decode_share"]) == (0, 0, 0)
    assert busy["engine_busy_s"] > 0
    assert 0 < busy["decode_share"] <= 1
    assert busy["prefix_hit_rate"] == pytest.approx(256 / 300)
    assert busy["preemptions"] == 0
    assert 0 < busy["kv_cache_peak"] < 1
    assert (idle["engine_busy_s"], idle["preemptions"]) == (0, 0)
    assert all(math.isnan(idle[figure]) for figure in ("decode_share", "prefix_hit_rate"))
