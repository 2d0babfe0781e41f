"""Faults of vLLM on CPU: each is mended, and each test says when vLLM no longer needs that."""

import hashlib
import importlib.metadata
import math
import shutil
import time
from pathlib import Path

import pytest

from infra.engine.client import EngineClient
from infra.engine.errors import EngineError
from infra.engine.launch import start
from infra.engine.spec import EngineHandle, EngineSpec, Role

NO_LONGER = "vLLM does this right by itself: remove the repair"
PROMPT = [1, 520, 9531, 198, 17, 4]
LONG = [(7 * i) % 4000 + 3 for i in range(150)]
"""Longer than a block of the prefix cache (128 tokens)."""


@pytest.fixture(scope="module")
def moved(tiny_llama, tmp_path_factory) -> Path:
    """tiny_llama after an update of all of its parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("moved")
    shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder


def most_likely(model: Path, token_ids: list[int]) -> float:
    """Log-prob of the likeliest next token, by HF."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return network(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1).max().item()


async def next_logprob(client: EngineClient, token_ids: list[int]) -> float:
    return (await client.generate(token_ids, max_new_tokens=1, temperature=0)).logprobs[0]


async def reloaded(handle: EngineHandle, model: Path) -> dict[str, float]:
    async with EngineClient(handle) as client:
        await next_logprob(client, LONG)  # its first block is now cached
        await client.collective_rpc("reload_weights", weights_path=str(model))
        found = {"short": await next_logprob(client, PROMPT), "cached": await next_logprob(client, LONG)}
        await client.reset_prefix_cache()
        return found | {"forgotten": await next_logprob(client, LONG)}


def test_reloaded_weights_reach_a_tied_head(tiny_llama, moved, tiny_engine_config, tmp_path, run):
    with start(EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config), tmp_path) as engine:
        found = run(reloaded(engine.handle(), moved))
    assert found["short"] == pytest.approx(most_likely(moved, PROMPT), abs=1e-4)
    assert found["forgotten"] == pytest.approx(most_likely(moved, LONG), abs=1e-4)
    assert found["cached"] != pytest.approx(found["forgotten"], abs=1e-4), f"reloading resets the cache; {NO_LONGER}"


def test_without_the_repair_a_tied_head_stays_old(tiny_llama, moved, tiny_engine_config, tmp_path, run, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    config = tiny_engine_config.model_copy(update={"extra_flags": ['--weight-transfer-config={"backend": "ipc"}']})
    with start(EngineSpec(model=tiny_llama, role=Role.rollout, config=config), tmp_path) as engine:
        found = run(reloaded(engine.handle(), moved))
    assert found["short"] != pytest.approx(most_likely(moved, PROMPT), abs=1e-4), NO_LONGER


def test_sleep_is_refused_where_it_would_free_nothing(engine, tiny_llama, tiny_engine_config, run):
    handle = engine(EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)).handle()

    async def sleep() -> bool:
        async with EngineClient(handle) as client:
            with pytest.raises(EngineError, match="an engine on CPU cannot sleep"):
                await client.sleep()
            assert not await client.is_sleeping()
            await client._control("POST", "/sleep?level=1")
            await client.wake_up(["weights"])
            half_awake = await client.is_sleeping()
            await client.wake_up()
            await client.generate(PROMPT, max_new_tokens=1, temperature=0)
            return half_awake

    assert run(sleep()), NO_LONGER


def test_vllms_own_checksums_miss_packed_weights(engine, tiny_llama, tiny_engine_config, run):
    """Why `infra.transport` reads weights back through the layers."""
    handle = engine(EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)).handle()

    async def checksums() -> dict[str, str]:
        async with EngineClient(handle) as client:
            return (await client._control("POST", "/weight_checker", {"action": "checksum"}))["checksums"]

    nothing = hashlib.sha256(b"").hexdigest()
    empty = [name for name, checksum in run(checksums()).items() if checksum == nothing]
    assert any("qkv_proj" in name for name in empty), NO_LONGER


def test_vllms_own_command_does_not_know_its_distribution():
    """Why `infra.engine.server` runs the server itself."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def test_vllms_own_key_leaves_rl_routes_open(run):
    """Why `infra.engine.middleware` guards every path."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    reached = []

    async def app(scope, receive, send) -> None:
        reached.append(scope["path"])

    async def ask() -> None:
        guard = AuthenticationMiddleware(app, tokens=["key"])
        for path in ("/collective_rpc", "/pause", "/update_weights"):
            await guard({"type": "http", "method": "POST", "path": path, "headers": []}, None, None)

    run(ask())
    assert reached == ["/collective_rpc", "/pause", "/update_weights"], NO_LONGER


def test_pinned_memory_still_wants_cuda():
    """Why `infra.engine.hidden_states` copies without it where there is no GPU."""
    import torch

    with pytest.raises(RuntimeError):
        torch.empty(1, pin_memory=True)


def test_a_process_that_waits_for_another_sleeps(tmp_path, monkeypatch):
    """It sleeps where it waits at its socket, for milliseconds."""
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from infra.engine import quirks

    slept = []

    class Poller:
        def poll(self, timeout: int) -> list:
            slept.append(timeout)
            return []

    with zmq.Context() as context:
        reader = SpinCondition(True, context, f"ipc://{tmp_path}/news")
        reader.poller = Poller()
        reader.last_read = time.monotonic() + 3600  # a moment ago, however slow the machine is
        reader.wait(5000)
        assert slept == [], NO_LONGER
        monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # put back after the test
        quirks.wait_for_messages_asleep()
        reader.wait(5000)
        reader.last_read = -math.inf
        reader.wait(5000)
        assert slept == [quirks.NAP_MS, 5000]
        context.destroy(linger=0)
