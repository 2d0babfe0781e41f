"""Rollouts with a drafter: the same tokens and log-probs, before and after new weights, and none where it is slower."""

import asyncio

import pytest
from transport_trainer import Trainer

from infra.engine.client import EngineClient
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role, Speculation
from infra.transport.shm import ShmSender
from infra.transport.sync import sync

CLOSE = 2e-5  # nats between engine and trainer for the same weights
PROMPT, NEW = list(range(2000, 2040)), 24
LONG = 200  # tokens of an answer beside which another one's coming and going a few passes apart is little


def test_speculating_rollouts_are_the_policys_own(tiny_qwen3, tiny_engine_config, tmp_path, run):
    """The drafter is the target as it was: at first all is accepted, after an update nearly nothing, and no token or
    log-prob is another for it. While two requests are in flight, by this schedule, nothing is proposed."""
    drafter = Speculation(
        method="draft_model", model=tiny_qwen3, num_speculative_tokens=3, schedule=[(1, 1, 3), (2, 64, 0)]
    )
    spec = EngineSpec(model=tiny_qwen3, role=Role.rollout, config=tiny_engine_config, speculation=drafter)
    trainer = Trainer(tiny_qwen3)

    async def rollout(client, seed, tokens=NEW):
        return await client.generate(PROMPT, max_new_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True)

    async def check(client) -> int:
        """Accepted tokens of a sampled and a greedy rollout that are compared with the trainer's forward pass."""
        before = await client.speculation()
        sampled = await rollout(client, seed=1)
        greedy = await client.generate(PROMPT, max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
        table = next_logprobs(trainer, sampled.token_ids)
        expected = [float(table[i, token]) for i, token in enumerate(sampled.token_ids)]
        assert sampled.logprobs == pytest.approx(expected, abs=CLOSE)
        assert greedy.token_ids == next_logprobs(trainer, greedy.token_ids).argmax(-1).tolist()
        counted = (await client.speculation()).since(before)
        assert counted.drafts > 0
        return counted.accepted_tokens

    async def whole():
        async with EngineClient(engine.handle()) as client:
            at_first = await check(client)
            quiet = await client.speculation()
            await asyncio.gather(*(rollout(client, seed, LONG) for seed in (2, 3)))
            alone = (await client.speculation()).since(quiet).drafts
            assert alone < LONG // 4, "only before the second has come and after the first has gone"
            trainer.step()
            published = sender.publish(1, trainer.weights().items())
            await sync([client], published)
            assert await check(client) < at_first

    with start(spec, tmp_path) as engine, ShmSender("float32") as sender:
        run(whole())


def next_logprobs(trainer: Trainer, token_ids: list[int]):
    """Natural log-probs of every token [NEW, vocab] at each place of an answer to PROMPT."""
    import torch

    with torch.no_grad():
        logits = trainer.model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)
