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
COUNTED = ("vllm:spec_decode_num_drafts_total", "vllm:generation_tokens_total")
LONG = 400  # tokens of an answer that another one is beside


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

    async def both_in_flight(client) -> tuple[int, int]:
        """Drafts, and tokens generated, between two looks at which both were: whoever comes first and last."""
        for _ in range(10):  # until two looks were that far apart
            asked, looks = asyncio.gather(*(rollout(client, seed, LONG) for seed in (2, 3))), []
            while not asked.done():
                samples = await client.metrics()
                if total(samples, "vllm:num_requests_running") == 2:
                    looks.append([int(total(samples, name)) for name in COUNTED])
            await asked
            if looks and looks[-1][1] - looks[0][1] >= LONG // 4:
                return looks[-1][0] - looks[0][0], looks[-1][1] - looks[0][1]
        pytest.fail(f"two requests of {LONG} tokens were never seen to be in flight together")

    async def whole():
        async with EngineClient(engine.handle()) as client:
            at_first = await check(client)
            drafts, tokens = await both_in_flight(client)
            assert drafts <= 1, f"but for the pass before both were there; they got {tokens} tokens since"
            trainer.step()
            published = sender.publish(1, trainer.weights().items())
            await sync([client], published)
            assert await check(client) < at_first

    with start(spec, tmp_path) as engine, ShmSender("float32") as sender:
        run(whole())


def total(samples: dict[str, float], name: str) -> float:
    """Of one metric, whatever its labels."""
    return sum(value for sample, value in samples.items() if sample.startswith(name))


def next_logprobs(trainer: Trainer, token_ids: list[int]):
    """Natural log-probs of every token [NEW, vocab] at each place of an answer to PROMPT."""
    import torch

    with torch.no_grad():
        logits = trainer.model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)
