"""A head trained on a target's own answers, served with it."""

import asyncio
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from captured_states import add
from safetensors.torch import save_file

from infra.config.drafter import DrafterConfig
from infra.engine.drafters import speculation
from infra.engine.spec import Capture, EngineSpec, Role
from tasks.drafter import contract
from tasks.drafter.answers import Answered, Answering, answer, longest
from tasks.drafter.capture import CaptureError, Layout, capture
from tasks.drafter.dataset import packs
from tasks.drafter.export import tokenizer_digest
from tasks.drafter.heads import load_weights
from tasks.drafter.serving import replay
from tasks.drafter.states import Sequence
from tasks.drafter.states_writer import StatesWriter
from tasks.drafter.streaming import chunks, stream
from tasks.drafter.template import ChatTemplate
from tasks.drafter.traffic import Prompt
from tasks.drafter.train import HeadTrainer
from tasks.drafter.walk import Walk
from tasks.drafter.worker import WHOLE, TrainerWorker, TrainingResult
from tasks.evaluate.acceptance import Measurement, measure

LAYERS = [2, 4, 5, 8]
NEW_TOKENS = 32
SUMS = [[(a, b) for a in range(2, 60) for b in range(2, 60) if (a + b) % 2 == part] for part in (0, 1)]
CONFIG = DrafterConfig(
    training_steps=60, draft_vocab_size=1024, micro_batch_tokens=512, held_out_share=0.15, num_speculative_tokens=3
)


def prompts(target: Path, count: int, seed: int) -> list[Prompt]:
    """Sums in the chat template: what a random model says of them is alike, so a head can learn it."""
    template, rng = ChatTemplate(target), random.Random(seed)
    asked = [[{"role": "user", "content": f"What is {a} plus {b}?"}] for a, b in rng.sample(SUMS[seed], count)]
    return [Prompt(domain="maths", messages=messages, token_ids=template(messages)) for messages in asked]


def capture_spec(target: Path, config, folder: Path) -> EngineSpec:
    return EngineSpec(model=target, role=Role.capture, config=config, capture=Capture(layer_ids=LAYERS, folder=folder))


@dataclass
class Made:
    target: Path
    answers: list[Answered]
    states: Path
    capturing: EngineSpec
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
    answering = Answering(max_new_tokens=NEW_TOKENS, max_prompt_tokens=256, temperature=0.0, seed=0, concurrency=8)
    answers = asyncio.run(answer(plain, prompts(target, 24, seed=0), answering))
    without = asyncio.run(measure(plain, held_out, subject="t", max_new_tokens=NEW_TOKENS, concurrency=4))
    capturing = capture_spec(target, tiny_engine_config, folder / "staging")
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
    return Made(
        target,
        answers,
        folder / "states",
        capturing,
        folder / "start",
        folder / "head",
        worker.result(),
        held_out,
        without,
    )


def served(made: Made, drafter: Path, config) -> EngineSpec:
    return EngineSpec(model=made.target, role=Role.eval, config=config, speculation=speculation(drafter, 3))


def acceptance_length(measurement: Measurement) -> float:
    return next(r["value"] for r in measurement.rows if r["figure"] == "acceptance_length")


def test_streamed_states_train_as_stored_ones_do(made, engine, tmp_path):
    """Half the budget holds two packs: training waits for capture and capture for training, and no state is kept."""
    if "qwen3" not in made.target.name:
        pytest.skip("one family is enough: states come the same way")
    config = CONFIG.model_copy(update={"training_steps": 12, "patience": 0})
    stored = HeadTrainer(made.target, made.states, config)
    stored.advance(12)
    held_out = [c.sequence.key for c in stored.held_out]
    answers = {a.key: a for a in made.answers}
    train = [answers[c.sequence.key] for c in stored.train]
    with StatesWriter(tmp_path / "kept", LAYERS) as writer:
        for one in stored.held_out:
            add(writer, one)
    sequences = [Sequence(**answered.model_dump()) for answered in train]
    worker, seen = TrainerWorker(), []
    worker.begin_streamed(made.target, tmp_path / "kept", held_out, sequences, config, None)

    def consume(folder: Path, steps: int):
        seen.append((steps, sum(p.stat().st_size for p in (tmp_path / "chunks").rglob("*.safetensors"))))
        return pool.submit(worker.consume, folder, steps)

    budget = 4 * 4 * 128 * len(LAYERS) * config.micro_batch_tokens
    with ThreadPoolExecutor(1) as pool:
        at = stream(
            engine(made.capturing).handle(),
            consume,
            lambda training: training.result(),
            train,
            packs(sequences, config),
            tmp_path / "chunks",
            done=0,
            layout=Layout(layer_ids=LAYERS, bytes_per_token=4 * 128 * len(LAYERS)),
            budget_bytes=budget,
            concurrency=4,
            every=5,
            steps=12,
        )
    assert at.finished and at.step == 12
    assert worker.trainer.curve.loss[1:] == pytest.approx(stored.curve.loss[1:], rel=1e-4)
    assert worker.trainer.curve.looks() == stored.curve.looks()
    assert len(seen) > 3 and max(size for _, size in seen) <= budget
    assert not (tmp_path / "chunks").exists()
    with pytest.raises(CaptureError, match="raise drafter.capture_budget_gib"):
        list(chunks(iter([[0, 1]]), [9, 9], 10, 100, most=5))


def test_training_raises_acceptance_and_leaves_the_output(made, engine, tiny_engine_config):
    lengths = []
    for drafter in (made.start, made.head):
        handle = engine(served(made, drafter, tiny_engine_config)).handle()
        labels = dict(subject="d", max_new_tokens=NEW_TOKENS, concurrency=4)
        measurement = asyncio.run(measure(handle, made.held_out, **labels))
        assert measurement.outputs == made.plain.outputs
        lengths.append(acceptance_length(measurement))
    before, after = lengths
    if "qwen3" in made.target.name:
        assert before < 1.1 and after > 2
    else:  # a random model with a tied head repeats its last token: the start, taken from the target, knows that
        assert before > 2 and after > 3.9


def test_the_engine_accepts_what_the_trained_head_proposes(made, engine, tiny_engine_config):
    expected = made.result.expected

    handle = engine(served(made, made.head, tiny_engine_config)).handle()
    walked = Walk(expected.drafts, expected.accepted)
    contract.check_served(asyncio.run(replay(handle, expected, 4)), walked, len(expected.prompts))


def test_an_answer_learned_by_heart_is_accepted_whole_or_something_is_wrong(made, engine, tiny_engine_config, tmp_path):
    sample = longest(made.answers, CONFIG.micro_batch_tokens)
    worker = TrainerWorker()
    assert worker.overfit(made.target, made.states, CONFIG, sample.key, most=150) >= WHOLE
    worker.export(tmp_path / "heart", tokenizer_digest(made.target), "float32")
    expected = worker.expected()
    assert expected.prompts == [sample.token_ids[: sample.answers[0][0]]]
    handle = engine(served(made, tmp_path / "heart", tiny_engine_config)).handle()
    contract.check_whole(asyncio.run(replay(handle, expected, 4)))
    if "qwen3" in made.target.name:  # one more engine is enough
        wrong = shutil.copytree(tmp_path / "heart", tmp_path / "wrong")
        weights = load_weights(wrong)
        weights["d2t"] += 1  # every proposal is the token beside the one that is meant
        save_file(weights, wrong / "model.safetensors")
        handle = engine(served(made, wrong, tiny_engine_config)).handle()
        with pytest.raises(contract.ContractError, match="knows by heart"):
            contract.check_whole(asyncio.run(replay(handle, expected, 4)))


def test_a_draft_model_is_distilled_and_served(made, engine, tiny_engine_config, tmp_path):
    if "qwen3" not in made.target.name:
        pytest.skip("two layers of the tied model repeat as the whole of it does: there is nothing to learn")
    worker = TrainerWorker()
    config = CONFIG.model_copy(update={"num_layers": 2, "patience": 0, "training_steps": 20})
    worker.begin_draft_model(made.target, made.answers, config, None)
    worker.advance(100)
    before, *_, after = worker.trainer.curve.looks()
    assert after > before
    worker.export(tmp_path / "small", tokenizer_digest(made.target), "float32")
    contract.check_draft_model(tmp_path / "small", made.target)
    expected = worker.expected()
    handle = engine(served(made, tmp_path / "small", tiny_engine_config)).handle()
    walked = Walk(expected.drafts, expected.accepted)
    contract.check_served(asyncio.run(replay(handle, expected, 4)), walked, len(expected.prompts))
    measurement = asyncio.run(measure(handle, made.held_out, subject="d", max_new_tokens=NEW_TOKENS, concurrency=4))
    assert measurement.outputs == made.plain.outputs
    # And it is started from, as it was.
    again = TrainerWorker()
    again.begin_draft_model(made.target, made.answers, CONFIG, tmp_path / "small")
    assert Walk(expected.drafts, expected.accepted) == again.trainer.acceptance()
