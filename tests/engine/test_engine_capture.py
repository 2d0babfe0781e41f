"""Captured hidden states are HF's, complete, and written only for those who asked."""

import asyncio
import os

import pytest

from infra.engine import captures
from infra.engine.client import EngineClient
from infra.engine.errors import EngineError
from infra.engine.spec import Capture, EngineSpec, Role

LAYERS = [0, 2, 4, 5, 8]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen3"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def capturing(engine, model, tiny_engine_config, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"states-{model.name}"
    spec = EngineSpec(
        model=model, role=Role.capture, config=tiny_engine_config, capture=Capture(layer_ids=LAYERS, folder=folder)
    )
    return engine(spec)


def hf_states(model, token_ids):
    """[tokens, layers, hidden]: residual stream after each number of layers, the last one before the final norm."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    last = []
    network.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        states = list(network(token_ids[None], output_hidden_states=True).hidden_states)
    states[-1] = last[0]
    return torch.stack([states[layer][0] for layer in LAYERS], dim=1)


def test_states_of_a_batch_equal_hfs(capturing, model, run):
    import torch

    prompts = [[1, 5 + i, 300 * i, 77] + [9 + i] * (i % 5) for i in range(24)]

    async def capture():
        async with EngineClient(capturing.handle()) as client:
            asked = [
                client.capture(p, max_new_tokens=6, temperature=1.0, seed=i, ignore_eos=True)
                for i, p in enumerate(prompts)
            ]
            generations = await asyncio.gather(*asked)
            await client.flush_captures()
            return generations

    for generation in run(capture()):
        states, token_ids = captures.load(generation.hidden_states_path)
        assert token_ids.tolist() == (generation.prompt_ids + generation.token_ids)[:-1]
        assert states.shape == (len(token_ids), len(LAYERS), 128)
        torch.testing.assert_close(states, hf_states(model, token_ids), atol=2e-4, rtol=2e-4)
        captures.discard(generation.hidden_states_path)
    assert os.listdir(capturing.spec.capture.folder) == []


def test_other_requests_leave_no_files(capturing, run):
    async def ask():
        async with EngineClient(capturing.handle()) as client:
            plain = await client.generate([1, 2, 3], max_new_tokens=3, temperature=0)
            await client.score([1, 2, 3], top_k=1)
            await client.chat([{"role": "user", "content": "hello"}], max_tokens=2)
            await client.flush_captures()
            return plain

    assert run(ask()).hidden_states_path is None
    assert os.listdir(capturing.spec.capture.folder) == []


def test_a_file_that_is_never_written_is_told(tmp_path):
    import fcntl

    path = tmp_path / "one.safetensors"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match="still unwritten: call flush_captures first"):
            captures.load(path, timeout_s=0)
    with pytest.raises(EngineError, match="the engine did not write"):
        captures.load(path)
