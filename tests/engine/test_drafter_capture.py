"""Hidden states from the engine, against a forward pass of the same model."""

import asyncio
from pathlib import Path

import pytest
import torch

from infra.engine.spec import Capture, EngineSpec, Role
from tasks.drafter.answers import Answered, Answering, answer
from tasks.drafter.capture import capture, layer_bytes
from tasks.drafter.contract import captured_layers
from tasks.drafter.states import StatesWriter, read_states
from tasks.drafter.traffic import Prompt

LAYERS = [2, 4, 5, 8]
ANSWERING = Answering(max_new_tokens=12, temperature=0.0, seed=0, concurrency=4)


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


def run(capturing, answered, writer, *, budget=2**30, progress=lambda done, of: None) -> int:
    return asyncio.run(
        capture(
            capturing[0].handle(),
            answered,
            writer,
            bytes_per_token=4 * 128 * len(LAYERS),
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


def test_an_interrupted_capture_goes_on(answered, capturing, tmp_path):
    with StatesWriter(tmp_path, LAYERS) as writer:
        assert run(capturing, answered[:2], writer) == 2
    seen = []
    with StatesWriter(tmp_path, LAYERS) as writer:
        assert run(capturing, answered, writer, progress=lambda done, of: seen.append((done, of))) == 5
    assert seen[0] == (2, 5) and seen[-1] == (5, 5)
    assert [c.sequence.key for c in read_states(tmp_path)] == [a.key for a in answered]


def test_capture_stops_before_its_budget_is_exceeded(answered, capturing, tmp_path):
    budget = 4 * 128 * len(LAYERS) * sum(len(a.token_ids) for a in answered[:3])
    with StatesWriter(tmp_path, LAYERS) as writer:
        assert run(capturing, answered, writer, budget=budget) == 3
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) <= budget + 4096
