"""Two engines over every transport, each its own, and what is left when one side fails half-way."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from transport_trainer import Trainer, distance, engine_logprobs
from weed import KEYS

from infra.engine.client import EngineClient
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role
from infra.transport.base import Published, Reach, SyncError
from infra.transport.nccl import NcclSender
from infra.transport.shm import ShmSender
from infra.transport.store import StoreSender
from infra.transport.sync import sync, verify
from infra.transport.transports import TRANSPORTS, make_sender

CLOSE = 2e-5
PATIENT = Reach(stall_s=120)
"""Where nothing is meant to stall, however slow the machine."""


@pytest.fixture(scope="module")
def bucket(s3_endpoint):
    """A place in object storage whose credentials this process and the engines that it starts have."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": s3_endpoint}).items():
            patch.setenv(name, value)
        yield "s3://artifacts/weights"


@pytest.fixture(scope="module")
def engines(tmp_path_factory, tiny_llama, tiny_engine_config, bucket):
    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)
    logs = tmp_path_factory.mktemp("logs")
    with start(spec, logs) as first, start(spec, logs) as second:
        yield first, second


@pytest.fixture(scope="module")
def trainer(tiny_llama):
    return Trainer(tiny_llama)


async def all_serve(clients: list[EngineClient], trainer: Trainer) -> bool:
    return all([distance(await engine_logprobs(client), trainer.logprobs()) < CLOSE for client in clients])


@pytest.mark.parametrize(("transport", "where"), [*((name, "folder") for name in TRANSPORTS), ("store", "bucket")])
def test_every_transport_brings_all_engines_to_each_version(engines, trainer, run, transport, where, bucket, tmp_path):
    folder = bucket if where == "bucket" else tmp_path

    async def check():
        async with EngineClient(engines[0].handle()) as one, EngineClient(engines[1].handle()) as two:
            with make_sender(transport, "float32", Reach(folder=folder, stall_s=PATIENT.stall_s)) as sender:
                for version in (1, 2):
                    trainer.step()
                    published = sender.publish(version, trainer.weights().items(), engines=2)
                    report = await sync([one, two], published)
                    assert report.version == version and min(report.transfer_s, report.finalize_s) > 0
                with pytest.raises(SyncError, match="version 2 has arrived before"):
                    await sync([one], sender.offer(1))
                assert await all_serve([one, two], trainer)

    run(check())


def test_a_fleet_may_be_reached_over_several_transports_at_once(engines, trainer, run, tmp_path):
    async def check():
        async with EngineClient(engines[0].handle()) as near, EngineClient(engines[1].handle()) as far:
            with ShmSender("float32") as shm, StoreSender("float32", Reach(folder=tmp_path)) as store:
                for version in (1, 2):
                    trainer.step()
                    offers = [sender.publish(version, trainer.weights().items()) for sender in (shm, store)]
                    await sync([near, far], offers)
                    assert await all_serve([near, far], trainer)
                    await verify(far, offers[0])  # the checksums do not depend on the way
                with pytest.raises(ValueError, match="as many publications as engines"):
                    await sync([near, far], offers[:1])

    run(check())


def test_a_damaged_change_leaves_the_old_weights_and_the_next_version_is_whole(engines, trainer, run, tmp_path):
    async def check():
        async with EngineClient(engines[0].handle()) as client:
            with StoreSender("float32", Reach(folder=tmp_path)) as sender:
                await sync([client], sender.publish(1, trainer.weights().items()))
                before = await engine_logprobs(client)
                trainer.step()
                published = sender.publish(2, trainer.weights().items())
                shard = min(tmp_path.glob("*/version-00000002/*.safetensors"))
                data = bytearray(shard.read_bytes())
                data[len(data) // 2] ^= 1
                shard.write_bytes(data)
                with pytest.raises(SyncError, match=f"could not take version 2: {shard} is not what the trainer wrote"):
                    await sync([client], published)
                assert await engine_logprobs(client) == before and not await client.is_paused()
                await sync([client], sender.publish(3, trainer.weights().items()))
                assert sender.manifest.base is None and await all_serve([client], trainer)

    run(check())


async def staging(client: EngineClient, update: asyncio.Task) -> None:
    """Returns once the engine works on the update."""
    while (await client.collective_rpc("weight_transfer_status"))[0]["state"] != "staging":
        assert not update.done(), update.exception()


def test_a_trainer_killed_while_it_sends_is_named_and_its_successor_is_followed(engines, trainer, run, tiny_llama):
    code = (
        "import sys, time; from safetensors.torch import load_file\n"
        "from infra.transport.base import Reach; from infra.transport.nccl import NcclSender\n"
        "sender = NcclSender('float32', Reach(stall_s=120))\n"
        "published = sender.publish(1, load_file(sys.argv[1]).items(), engines=2)\n"
        "print(published.model_dump_json(), flush=True); time.sleep(600)"
    )
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.dirname(__file__)))}

    async def check(process, published):
        async with EngineClient(engines[0].handle()) as client:
            before = await engine_logprobs(client)
            updating = asyncio.create_task(sync([client], published))  # the second engine never comes
            await staging(client, updating)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(SyncError, match=f"{client.handle.url} could not take version 1: the trainer's process"):
                await updating
            assert await engine_logprobs(client) == before and not await client.is_paused()
            with NcclSender("float32", PATIENT) as sender:
                await sync([client], sender.publish(1, trainer.weights().items()))
            assert await all_serve([client], trainer)

    command = [sys.executable, "-c", code, str(tiny_llama / "model.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        run(check(process, Published.model_validate_json(process.stdout.readline())))


def test_an_engine_that_does_not_come_is_told_and_the_others_are_served_alone(engines, trainer, run):
    async def check():
        async with EngineClient(engines[0].handle()) as client:
            trainer.step()
            with NcclSender("float32", Reach(stall_s=5)) as sender:
                published = sender.publish(1, trainer.weights().items(), engines=2)
                with pytest.raises(SyncError, match="1 of 2 engines joined the broadcast within 5 s"):
                    await sync([client], published)
                sender.reach = PATIENT
                await sync([client], sender.offer(1))
            assert await all_serve([client], trainer)

    run(check())


def test_an_engine_killed_while_it_receives_is_named_and_the_other_gets_the_version(engines, trainer, run):
    """The last test here: it costs an engine."""

    async def check():
        async with EngineClient(engines[0].handle()) as client, EngineClient(engines[1].handle()) as victim:
            trainer.step()
            with NcclSender("float32", Reach(stall_s=10)) as sender:
                published = sender.publish(1, trainer.weights().items(), engines=3)  # the third never comes
                updating = asyncio.create_task(sync([client, victim], published))
                await staging(victim, updating)
                os.kill(engines[1].pid, signal.SIGKILL)
                with pytest.raises(SyncError, match="(does not answer|answered 5|of 3 engines joined)"):
                    await updating
                sender.reach = PATIENT
                await sync([client], sender.offer(1))
            assert await all_serve([client], trainer)

    run(check())
