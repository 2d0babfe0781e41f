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


@pytest.fixture
def connector(tmp_path):
    """The connector's writing side as in a worker, without an engine, and its KV cache: 40 blocks of 4 tokens."""
    import torch

    from infra.engine.hidden_states import HiddenStatesConnector, ThreadPoolExecutor

    connector = HiddenStatesConnector.__new__(HiddenStatesConnector)
    connector._kv_cache = torch.randn(40, 4, len(LAYERS), 8).transpose(1, 2)
    connector._executor, connector._copier = ThreadPoolExecutor(2), ThreadPoolExecutor(1)
    connector._is_tp_rank_zero = True
    connector._lock_fds, connector._req_futures, connector._req_copy_events = {}, {}, {}
    connector._accumulated_finished_req_ids = set()
    with connector._executor, connector._copier:
        yield connector


def save(connector, folder, requests: dict[str, tuple[list[int], int]]) -> None:
    """Have the states of requests, given as blocks and tokens, written, up to where their blocks are free."""
    import fcntl

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnectorMetadata,
        PendingSave,
    )

    pending = []
    for name, (blocks, tokens) in requests.items():
        path = folder / f"{name}.safetensors"
        connector._lock_fds[name] = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(connector._lock_fds[name], fcntl.LOCK_EX)
        pending.append(PendingSave(name, str(path), torch.arange(tokens), blocks))
    connector.bind_connector_metadata(ExampleHiddenStatesConnectorMetadata(pending))
    for copied in list(connector._req_copy_events.values()):
        assert copied.synchronize(60)
    assert connector.get_finished(set(requests)) == (set(requests), None)
    assert not connector._lock_fds


def test_requests_that_finish_together_get_their_own_states(connector, tmp_path, monkeypatch):
    import torch

    from infra.engine import hidden_states

    monkeypatch.setattr(hidden_states, "COPIED_BYTES", 5 * connector._kv_cache[0].nbytes)
    requests = {"a": ([3, 39, 1], 11), "b": ([7], 4), "none": ([], 0), "large": ([*range(10, 20)], 37), "d": ([30], 1)}
    save(connector, tmp_path, requests)
    memory = connector._kv_cache.transpose(1, 2)
    for name, (blocks, tokens) in requests.items():
        states, token_ids = captures.load(tmp_path / f"{name}.safetensors")
        assert torch.equal(states, memory[blocks].flatten(0, 1)[:tokens])
        assert token_ids.tolist() == list(range(tokens))


def test_states_that_cannot_be_copied_are_told_at_once(connector, tmp_path):
    save(connector, tmp_path, {"lost": ([40], 4)})  # there is no such block
    with pytest.raises(EngineError, match="the engine did not write .*lost.safetensors: see its log"):
        captures.load(tmp_path / "lost.safetensors", timeout_s=60)
