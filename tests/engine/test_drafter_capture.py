"""Hidden states from the engine, against a forward pass of the same model."""

import asyncio
from pathlib import Path

import pytest
import torch

from infra.engine.spec import Capture, EngineSpec, Role
from tasks.drafter.answers import Answered, Answering, answer
from tasks.drafter.capture import CaptureError, capture, layer_bytes
from tasks.drafter.contract import captured_layers
from tasks.drafter.sources import own
from tasks.drafter.sources.base import TrafficError
from tasks.drafter.states import read_states
from tasks.drafter.states_writer import StatesWriter
from tasks.drafter.template import ChatTemplate
from tasks.drafter.traffic import Prompt

LAYERS = [2, 4, 5, 8]
BYTES = 4 * 128 * 4  # of a token: float32, 128 features, four layers
ANSWERING = Answering(max_new_tokens=12, max_prompt_tokens=256, temperature=0.0, seed=0, concurrency=4)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tiny_llama, tiny_qwen3) -> Path:
    return {"llama": tiny_llama, "qwen3": tiny_qwen3}[request.param]


@pytest.fixture(scope="module")
def answered(target, engine, tiny_engine_config) -> list[Answered]:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(
            domain="chat", messages=[], token_ids=torch.randint(3, 40000, (5 + 20 * i,), generator=generator).tolist()
        )
        for i in range(5)
    ]
    handle = engine(EngineSpec(model=target, role=Role.eval, config=tiny_engine_config)).handle()
    return asyncio.run(answer(handle, prompts, ANSWERING))


def spec(target: Path, config, folder: Path) -> EngineSpec:
    return EngineSpec(model=target, role=Role.capture, config=config, capture=Capture(layer_ids=LAYERS, folder=folder))


@pytest.fixture(scope="module")
def capturing(target, engine, tiny_engine_config, tmp_path_factory):
    """The capture engine and its folder."""
    folder = tmp_path_factory.mktemp("staging")
    return engine(spec(target, tiny_engine_config, folder)), folder


def run(capturing, answered, writer, *, budget=2**30, bytes_per_token=BYTES, progress=lambda done, of: None) -> int:
    return asyncio.run(
        capture(
            capturing[0].handle(),
            answered,
            writer,
            bytes_per_token=bytes_per_token,
            budget_bytes=budget,
            concurrency=1,
            on_progress=progress,
        )
    )


def test_states_are_those_of_a_forward_pass(target, answered, capturing, tmp_path):
    from transformers import AutoModelForCausalLM

    with StatesWriter(tmp_path, LAYERS) as writer:
        assert run(capturing, answered, writer) == len(answered)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0][0]))
    captured = list(read_states(tmp_path))
    assert [c.sequence.key for c in captured] == [a.key for a in answered]
    for one in captured:
        sequence = one.sequence
        with torch.no_grad():
            output = model(torch.tensor([sequence.token_ids[:-1]]), output_hidden_states=True)
        expected = torch.stack([output.hidden_states[i][0] for i in LAYERS[:-1]] + [before_norm.pop()], dim=1)
        torch.testing.assert_close(one.states, expected, atol=2e-5, rtol=2e-4)
        # The states are those from which the answer was sampled.
        greedy = output.logits[0].argmax(-1)[sequence.num_prompt_tokens - 1 :]
        assert greedy.tolist() == sequence.token_ids[sequence.num_prompt_tokens :]
    assert not list(capturing[1].glob("*.safetensors")), "the engine's own files are gone"
    assert captured_layers(target) == LAYERS
    assert layer_bytes(target, len(LAYERS), "float32") == captured[0].states[0].numel() * 4


def test_each_answer_of_a_conversation_stands_behind_what_serving_would_put_there(
    target, engine, tiny_engine_config, tmp_path
):
    """With the template of SmolLM2, in which the answers of a random model do not survive their way through text; and
    with one in which those of the tied model do."""
    from transformers import AutoTokenizer

    handle = engine(EngineSpec(model=target, role=Role.eval, config=tiny_engine_config)).handle()
    first, *later = ([{"role": "user", "content": text}] for text in ("What is 2 plus 3?", "And 4?", "Thank you."))
    echo = AutoTokenizer.from_pretrained(target)
    echo.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user {{ m.content }}<|im_end|> assistant yes"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    numbers = []
    for name, tokenizer in (("real", AutoTokenizer.from_pretrained(target)), ("echo", echo)):
        tokenizer.save_pretrained(folder := tmp_path / name)
        template = ChatTemplate(folder)
        prompt = Prompt(domain="chat", messages=first, token_ids=template(first), later=later)
        sequences = asyncio.run(answer(handle, [prompt], ANSWERING, template))
        behind = {tuple(s.token_ids[:start]): s.token_ids[start:end] for s in sequences for start, end in s.answers}
        messages = []
        for turn in (first, *later):
            messages += turn
            generated = behind[tuple(template(messages))]
            messages.append({"role": "assistant", "content": template.text(generated)})
        assert len(behind) == 3
        assert len({s.key for s in sequences}) == len(sequences)
        numbers.append(len(sequences))
    if "llama" in target.name:
        assert numbers[1] == 1, "what is repeated unchanged goes on in the same sequence"


def test_too_few_usable_prompts_of_its_own_are_told(target, engine, tiny_engine_config):
    handle = engine(EngineSpec(model=target, role=Role.eval, config=tiny_engine_config)).handle()
    with pytest.raises(TrafficError, match="the target wrote 0 usable prompts in 16 attempts of 8 tokens, 2 are"):
        asyncio.run(own.write(handle, ChatTemplate(target), 2, max_tokens=8, concurrency=4, seed=0))


def test_an_interrupted_capture_goes_on(answered, capturing, tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer:
        assert run(capturing, answered[:2], writer) == 2
    seen = []
    with StatesWriter(tmp_path, LAYERS) as writer:
        assert run(capturing, answered, writer, progress=lambda done, of: seen.append((done, of))) == 5
    assert seen[0] == (2, 5) and seen[-1] == (5, 5)
    assert [c.sequence.key for c in read_states(tmp_path)] == [a.key for a in answered]


def test_a_disk_that_would_fill_stops_the_capture_before_it_does(answered, capturing, tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer, pytest.raises(CaptureError, match="GiB free.*drafter.stream=true"):
        run(capturing, answered, writer, budget=2**80, bytes_per_token=2**40)
    assert not list(tmp_path.glob("*.safetensors"))


def test_capture_stops_before_its_budget_is_exceeded(answered, capturing, tmp_path):
    budget = 4 * 128 * len(LAYERS) * sum(len(a.token_ids) for a in answered[:3])
    with StatesWriter(tmp_path, LAYERS) as writer:
        assert run(capturing, answered, writer, budget=budget) == 3
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) <= budget + 4096
