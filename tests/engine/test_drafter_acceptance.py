"""A head trained on a target's own answers, served with it."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.config.drafter import DrafterConfig
from infra.engine.client import EngineClient
from infra.engine.spec import Capture, EngineSpec, Role, Speculation
from tasks.drafter import contract
from tasks.drafter.answers import Answering, answer
from tasks.drafter.capture import capture
from tasks.drafter.export import tokenizer_digest
from tasks.drafter.states import StatesWriter
from tasks.drafter.traffic import Prompt, chat_template
from tasks.drafter.walk import Walk
from tasks.drafter.worker import TrainerWorker, TrainingResult
from tasks.evaluate.acceptance import Measurement, measure

LAYERS = [2, 4, 5, 8]
NEW_TOKENS = 32
SUMS = [[(a, b) for a in range(2, 60) for b in range(2, 60) if (a + b) % 2 == part] for part in (0, 1)]
CONFIG = DrafterConfig(
    training_steps=60, draft_vocab_size=1024, micro_batch_tokens=512, held_out_share=0.15, num_speculative_tokens=3
)


def prompts(target: Path, count: int, seed: int) -> list[Prompt]:
    """Sums in the chat template: what a random model says of them is alike, so a head can learn it."""
    template, rng = chat_template(target), random.Random(seed)
    asked = [[{"role": "user", "content": f"What is {a} plus {b}?"}] for a, b in rng.sample(SUMS[seed], count)]
    return [Prompt(domain="maths", messages=messages, token_ids=template(messages)) for messages in asked]


@dataclass
class Made:
    target: Path
    start: Path
    head: Path
    result: TrainingResult
    held_out: dict[str, list[list[int]]]
    plain: Measurement


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def made(request, tiny_llama, tiny_qwen3, engine, tiny_engine_config, tmp_path_factory) -> Made:
    """A head trained on the answers of a random model, which a greedy answer soon repeats."""
    target = {"llama": tiny_llama, "qwen3": tiny_qwen3}[request.param]
    folder = tmp_path_factory.mktemp("made")
    held_out = {"maths": [p.token_ids for p in prompts(target, 8, seed=1)]}
    plain = engine(EngineSpec(model=target, role=Role.eval, config=tiny_engine_config)).handle()
    answering = Answering(max_new_tokens=NEW_TOKENS, temperature=0.0, seed=0, concurrency=8)
    answers = asyncio.run(answer(plain, prompts(target, 24, seed=0), answering))
    without = asyncio.run(measure(plain, held_out, subject="t", max_new_tokens=NEW_TOKENS, concurrency=4))
    capturing = EngineSpec(
        model=target,
        role=Role.capture,
        config=tiny_engine_config,
        capture=Capture(layer_ids=LAYERS, folder=folder / "staging"),
    )
    with StatesWriter(folder / "states", LAYERS) as writer:
        asyncio.run(
            capture(
                engine(capturing).handle(),
                answers,
                writer,
                bytes_per_token=4 * 128 * len(LAYERS),
                budget_bytes=2**30,
                concurrency=8,
            )
        )
    worker = TrainerWorker()
    worker.begin(target, folder / "states", CONFIG, None)
    worker.export(folder / "start", tokenizer_digest(target), "float32")
    worker.advance(CONFIG.training_steps)
    worker.export(folder / "head", tokenizer_digest(target), "float32")
    contract.check(folder / "head", target)
    return Made(target, folder / "start", folder / "head", worker.result(), held_out, without)


def served(made: Made, drafter: Path, config) -> EngineSpec:
    speculation = Speculation(method="eagle3", model=drafter, num_speculative_tokens=3)
    return EngineSpec(model=made.target, role=Role.eval, config=config, speculation=speculation)


def acceptance_length(measurement: Measurement) -> float:
    return next(r["value"] for r in measurement.rows if r["figure"] == "acceptance_length")


def test_training_raises_acceptance_and_leaves_the_output(made, engine, tiny_engine_config):
    lengths = []
    for drafter in (made.start, made.head):
        handle = engine(served(made, drafter, tiny_engine_config)).handle()
        labels = dict(subject="d", max_new_tokens=NEW_TOKENS, concurrency=4)
        measurement = asyncio.run(measure(handle, made.held_out, **labels))
        assert measurement.outputs == made.plain.outputs
        lengths.append(acceptance_length(measurement))
    before, after = lengths
    assert after > 1.5
    # A random model with a tied head repeats its last token: the start, taken from the target, knows that already.
    assert before < 1.1 or "llama" in made.target.name


def test_the_engine_accepts_what_the_trained_head_proposes(made, engine, tiny_engine_config):
    expected = made.result.expected

    async def replay() -> Walk:
        async with EngineClient(engine(served(made, made.head, tiny_engine_config)).handle()) as client:
            before = await client.speculation()
            for prompt, count in zip(expected.prompts, expected.num_new_tokens, strict=True):
                await client.generate(prompt, max_new_tokens=count, temperature=0.0)
            counted = (await client.speculation()).since(before)
            return Walk(counted.drafts, list(counted.accepted_per_position))

    walked = Walk(expected.drafts, expected.accepted)
    contract.check_served(asyncio.run(replay()), walked, len(expected.prompts))
