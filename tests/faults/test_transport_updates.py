import asyncio
import os
import signal
import subprocess
import sys

import pytest
from transport_trainer import Trainer, distance, engine_logprobs

from infra.engine.client import EngineClient
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role
from infra.store.models import resolve
from infra.transport.base import Published, SyncError
from infra.transport.memory import HEADER_BYTES
from infra.transport.shm import ShmSender
from infra.transport.sync import sync, verify

CLOSE = 2e-5


@pytest.fixture(scope="module")
def engine(tmp_path_factory, tiny_llama, tiny_engine_config):
    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)
    with start(spec, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(tiny_llama):
    return Trainer(tiny_llama)


@pytest.fixture
def sender():
    with ShmSender("float32") as sender:
        yield sender


def flip_a_byte(published: Published, name: str) -> None:
    (meta,) = (p for p in published.params if p.name == name)
    with open(published.location.split("?")[0], "r+b") as memory:
        memory.seek(HEADER_BYTES + meta.offset + meta.nbytes // 2)
        byte = memory.read(1)[0]
        memory.seek(-1, os.SEEK_CUR)
        memory.write(bytes([byte ^ 1]))


def without(weights: dict, name: str) -> dict:
    return {key: value for key, value in weights.items() if key != name}


def renamed(weights: dict, old: str, new: str) -> dict:
    return {new if key == old else key: value for key, value in weights.items()}


QUERY = "model.layers.3.self_attn.q_proj.weight"
NORM = "model.layers.3.input_layernorm.weight"
BAD_WEIGHTS = {
    "missing": (lambda w: without(w, QUERY), f"{QUERY} is missing"),
    "unknown": (lambda w: w | {"model.extra": w[NORM]}, "model.extra is not a parameter of the engine's model"),
    "misnamed": (lambda w: renamed(w, NORM, "model.norm2"), f"{NORM} is missing"),
    "shape": (lambda w: w | {NORM: w[NORM][:-1]}, rf"{NORM} has shape \[127\], the engine's model has \[128\]"),
    "untied": (lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] + 1}, "lm_head.weight is tied to"),
}


@pytest.mark.parametrize("bad", BAD_WEIGHTS)
def test_weights_that_do_not_fit_leave_the_old_ones(engine, trainer, sender, run, bad):
    change, words = BAD_WEIGHTS[bad]

    async def check():
        async with EngineClient(engine.handle()) as client:
            before = await engine_logprobs(client)
            trainer.step()
            published = sender.publish(1, change(trainer.weights()).items())
            with pytest.raises(SyncError, match=f"{client.handle.url}.*{words}"):
                await sync([client], published)
            assert await engine_logprobs(client) == before
            await sync([client], sender.publish(2, trainer.weights().items()))
            assert distance(await engine_logprobs(client), trainer.logprobs()) < CLOSE

    run(check())


@pytest.mark.parametrize("name", [QUERY, NORM, "model.embed_tokens.weight"])
def test_a_corrupted_byte_is_found_and_the_old_weights_stay(engine, trainer, sender, run, name):
    async def check():
        async with EngineClient(engine.handle()) as client:
            before = await engine_logprobs(client)
            trainer.step()
            published = sender.publish(1, trainer.weights().items())
            flip_a_byte(published, name)
            with pytest.raises(SyncError, match=f"could not take version 1: {name} arrived with checksum"):
                await sync([client], published)
            assert await engine_logprobs(client) == before and not await client.is_paused()

    run(check())


def test_versions_that_repeat_or_go_back_are_refused(engine, trainer, sender, run):
    async def check():
        async with EngineClient(engine.handle()) as client:
            trainer.step()
            published = sender.publish(5, trainer.weights().items())
            await sync([client], published)
            right = await engine_logprobs(client)
            with pytest.raises(SyncError, match="version 5 has arrived before"):
                await sync([client], published)
            with pytest.raises(SyncError, match="version 4 is older than what the engine serves"):
                await sync([client], sender.publish(4, trainer.weights().items()))
            with pytest.raises(SyncError, match="version 7 was announced, but the published memory holds version 6"):
                await sync([client], sender.publish(6, trainer.weights().items()).model_copy(update={"version": 7}))
            assert await engine_logprobs(client) == right
            assert await client.weight_version() == "5"

    run(check())


@pytest.mark.parametrize("source", ["random:llama", "random:qwen3"])
def test_a_stale_head_is_caught_and_the_engine_serves_nothing(source, sender, run, tmp_path, tiny_engine_config):
    extension = "--worker-extension-cls=tests.transport_plants.StaleHead"
    config = tiny_engine_config.model_copy(update={"extra_flags": [extension]})
    model = resolve(source)

    async def check(handle):
        trainer = Trainer(model)
        async with EngineClient(handle) as client:
            await sync([client], sender.publish(1, trainer.weights().items()))
            await client.collective_rpc("keep_head")
            trainer.step()
            await client.collective_rpc("plant_kept_head", planted="yes")
            published = sender.publish(2, trainer.weights().items())
            with pytest.raises(SyncError, match=f"{handle.url} computes with another lm_head.weight than version 2"):
                await sync([client], published)
            assert await client.is_paused()
            with pytest.raises(SyncError, match="another lm_head.weight"):
                await verify(client, published)
            await client.collective_rpc("plant_kept_head", planted="no")
            await sync([client], sender.publish(3, trainer.weights().items()))
            assert distance(await engine_logprobs(client), trainer.logprobs()) < CLOSE

    with start(EngineSpec(model=model, role=Role.rollout, config=config), tmp_path) as engine:
        run(check(engine.handle()))


def test_a_resumed_trainer_takes_over_and_the_old_one_is_shut_out(engine, trainer, sender, run):
    async def check():
        async with EngineClient(engine.handle()) as client:
            await sync([client], sender.publish(9, trainer.weights().items()))
            trainer.step()
            with ShmSender("float32") as resumed:
                await sync([client], resumed.publish(3, trainer.weights().items()))
            with pytest.raises(SyncError, match="a newer trainer has taken over this engine"):
                await sync([client], sender.publish(10, trainer.weights().items()))
            assert distance(await engine_logprobs(client), trainer.logprobs()) < CLOSE

    run(check())


def test_the_engines_type_is_required(engine, trainer, run):
    async def check():
        async with EngineClient(engine.handle()) as client:
            with ShmSender("bfloat16") as sender, pytest.raises(SyncError, match="the engine computes in float32"):
                await sync([client], sender.publish(1, trainer.weights().items()))

    run(check())


def test_a_trainer_killed_after_publishing_leaves_the_old_weights(engine, tiny_llama, run):
    code = (
        "import sys, time; from transport_trainer import Trainer; from pathlib import Path\n"
        "from infra.transport.shm import ShmSender\n"
        "published = ShmSender('float32').publish(1, Trainer(Path(sys.argv[1])).weights().items())\n"
        "print(published.model_dump_json(), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tiny_llama)]
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        published = Published.model_validate_json(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()

    async def check():
        async with EngineClient(engine.handle()) as client:
            before = await engine_logprobs(client)
            with pytest.raises(SyncError, match="the published weights are gone .* did the trainer die"):
                await sync([client], published)
            assert await engine_logprobs(client) == before

    run(check())


def test_an_update_that_takes_too_long_is_cut_and_the_next_one_succeeds(engine, trainer, sender, run):
    async def check():
        async with EngineClient(engine.handle()) as client:
            before = await engine_logprobs(client)
            trainer.step()
            with pytest.raises(SyncError, match="version 1, step prepare: not done after 0 s"):
                await sync([client], sender.publish(1, trainer.weights().items()), timeout_s=0.02)
            assert await engine_logprobs(client) == before and not await client.is_paused()
            await sync([client], sender.publish(2, trainer.weights().items()))
            assert distance(await engine_logprobs(client), trainer.logprobs()) < CLOSE

    run(check())


def test_no_engine_changes_when_one_cannot(engine, trainer, sender, run, tmp_path, tiny_qwen3, tiny_engine_config):
    spec = EngineSpec(model=tiny_qwen3, role=Role.rollout, config=tiny_engine_config)

    async def check(other):
        async with EngineClient(engine.handle()) as client, EngineClient(other.handle()) as stranger:
            before = await engine_logprobs(client)
            trainer.step()
            with pytest.raises(SyncError, match=f"{stranger.handle.url}.* is missing"):
                await sync([client, stranger], sender.publish(1, trainer.weights().items()))
            assert await engine_logprobs(client) == before and not await client.is_paused()

    with start(spec, tmp_path) as other:
        run(check(other))


def test_an_engine_killed_during_an_update_is_named(trainer, sender, run, tmp_path, tiny_llama, tiny_engine_config):
    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)

    async def check(victim):
        async with EngineClient(victim.handle()) as client:
            updating = asyncio.create_task(sync([client], sender.publish(1, trainer.weights().items())))
            await asyncio.sleep(0)
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(SyncError, match=f"{victim.url}.*(does not answer|answered 5)"):
                await updating

    with start(spec, tmp_path) as victim:
        run(check(victim))
