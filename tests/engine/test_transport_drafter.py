"""Weights of a drafter, pushed into an engine that speculates with it."""

import pytest
from transport_trainer import PROMPT, Trainer, distance, engine_logprobs

from infra.engine.client import EngineClient
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role, Speculation
from infra.transport.base import SyncError
from infra.transport.shm import ShmSender
from infra.transport.sync import sync, verify

K, TOKENS = 3, 60


async def accepted(client: EngineClient) -> tuple[float, list[int]]:
    """Acceptance length of one greedy answer, and the answer."""
    before = await client.speculation()
    tokens = (await client.generate(PROMPT[:40], max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)).token_ids
    return (await client.speculation()).since(before).acceptance_length, tokens


def test_a_pushed_drafter_is_what_the_engine_speculates_with(tmp_path, tiny_llama, tiny_engine_config, run):
    speculation = Speculation(method="draft_model", model=tiny_llama, num_speculative_tokens=K)
    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config, speculation=speculation)

    async def check(handle):
        target, drafter = Trainer(tiny_llama), Trainer(tiny_llama)
        first = {name: tensor.clone() for name, tensor in drafter.weights().items()}
        async with EngineClient(handle) as client:
            with ShmSender("float32") as targets, ShmSender("float32") as drafters:
                length, answer = await accepted(client)
                assert length > K  # the drafter is the target itself
                for _ in range(20):
                    drafter.step()
                published = drafters.publish(1, drafter.weights().items())
                await sync([client], published, model="drafter")
                await verify(client, published, model="drafter")
                with pytest.raises(SyncError, match="computes with another"):
                    await verify(client, published)  # the target is as it was
                worse, same = await accepted(client)
                assert same == answer and worse < length - 1
                await sync([client], drafters.publish(2, first.items()), model="drafter")
                better, same = await accepted(client)
                assert same == answer and better > K
                target.step()
                await sync([client], targets.publish(1, target.weights().items()))
                assert distance(await engine_logprobs(client), target.logprobs()) < 2e-5
                assert (await client.generate(PROMPT, max_new_tokens=1, temperature=0.0)).weight_versions[0][0] == "1"

    with start(spec, tmp_path) as engine:
        run(check(engine.handle()))


def test_an_engine_without_a_drafter_says_so(tmp_path, tiny_llama, tiny_engine_config, run, engine):
    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)

    async def check(handle):
        async with EngineClient(handle) as client:
            with (
                ShmSender("float32") as sender,
                pytest.raises(SyncError, match="has no drafter to update: it was started without one"),
            ):
                await sync([client], sender.publish(1, Trainer(tiny_llama).weights().items()), model="drafter")

    run(check(engine(spec).handle()))
