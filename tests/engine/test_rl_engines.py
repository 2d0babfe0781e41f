"""The engines of a run on real vLLM: one is killed, one hangs, others join and leave, and no request is lost."""

import asyncio
import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from infra.cluster.fleet import Engine, Fleet
from infra.cluster.placement import Resources
from infra.config.flows import RLFlowConfig
from infra.config.target import ClusterConfig
from infra.engine.errors import EngineError
from infra.services.runs import claim, read
from infra.transport.base import Published
from infra.transport.shm import ShmSender
from tasks.rl.engines import RolloutEngines

PROMPT, LONG = [100, 101, 102, 103], 300
LOCKSTEP = [sys.executable, "-c", "from flows.cli.main import main; main()"]


def processes_of(engine: Engine) -> list[psutil.Process]:
    """The API server of an engine and everything below it."""
    port = int(engine.client.handle.url.rsplit(":", 1)[1])
    listening = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    servers = [psutil.Process(pid) for pid in listening if pid]
    return [p for server in servers for p in [server, *server.children(recursive=True)]]


def engines_of(model: Path, config: RLFlowConfig, folder: Path) -> RolloutEngines:
    return RolloutEngines(model, config, folder, Resources(), updating=lambda engine: nullcontext())


async def generate(count: int, fleet: Fleet, started: asyncio.Event | None = None) -> list:
    """`count` long requests at once. started: set when one engine has been given all of them; it is paused, so that
    none has ended by then."""
    if started:
        await fleet.engines[0].client.pause()

    async def one(engine: Engine):
        if started and engine.in_use == count:
            started.set()
        return await engine.client.generate(PROMPT, max_new_tokens=LONG, temperature=1.0, ignore_eos=True)

    return await asyncio.gather(*(fleet.run(one) for _ in range(count)))


async def scale(count: int) -> str:
    """What `lockstep rl scale` prints, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *LOCKSTEP, "rl", "scale", str(count), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told.decode()


def test_requests_outlive_their_engine_and_engines_join_and_leave(
    tiny_llama, tiny_engine_config, tmp_path, monkeypatch
):
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    config = RLFlowConfig(engine=tiny_engine_config, cluster=ClusterConfig(probe_s=0.5))

    async def live(folder: Path) -> None:
        async with engines_of(tiny_llama, config, folder) as engines:
            fleet = engines.fleet
            await fleet.ready()
            with ShmSender("float32") as sender:
                version = 7

                async def publish(count: int) -> Published:
                    return sender.publish(version, load_file(tiny_llama / "model.safetensors").items(), count)

                async def again(count: int) -> Published:
                    return sender.offer(count)

                await engines.send(publish, again)
                started = asyncio.Event()
                working = asyncio.create_task(generate(16, fleet, started))
                await started.wait()
                for process in processes_of(fleet.engines[0]):
                    process.send_signal(signal.SIGKILL)
                answers = await working
                assert [len(answer.token_ids) for answer in answers] == [LONG] * 16
                assert (fleet.lost, fleet.retried) == (1, 16)
                assert {version for answer in answers for version, _, _ in answer.weight_versions} == {"7"}
                assert [engine.number for engine in fleet.engines] == [2]

                for process in processes_of(fleet.engines[0]):  # just before it is sent new weights
                    process.send_signal(signal.SIGKILL)
                version = 8
                assert (await engines.send(publish, again))[1] is None
                assert "engine 4 serves\n2 engines serve\n" in await scale(2)
                assert [await engine.client.weight_version() for engine in fleet.engines] == ["8", "8"]

                working = asyncio.create_task(generate(16, fleet))
                while {engine.in_use for engine in fleet.engines} != {8}:
                    await asyncio.sleep(0)
                assert re.search(r"engine \d is drained of \d+ requests(.*\n)+1 engines serve\n", await scale(1))
                assert [len(answer.token_ids) for answer in await working] == [LONG] * 16
                assert (len(fleet.engines), fleet.lost, fleet.retried) == (1, 2, 16)

    with claim("rl", config) as key:
        folder = read(key).folder / "rl"
        folder.mkdir()
        asyncio.run(live(folder))


def test_an_engine_that_hangs_is_replaced(tiny_llama, tiny_engine_config, tmp_path):
    config = RLFlowConfig(engine=tiny_engine_config, cluster=ClusterConfig(probe_s=2.0, stuck_s=10.0))

    async def live() -> None:
        async with engines_of(tiny_llama, config, tmp_path) as engines:
            await engines.fleet.ready()
            started = asyncio.Event()
            working = asyncio.create_task(generate(8, engines.fleet, started))
            await started.wait()
            hung = processes_of(engines.fleet.engines[0])
            for process in hung:
                os.kill(process.pid, signal.SIGSTOP)
            assert [len(answer.token_ids) for answer in await working] == [LONG] * 8
            assert engines.fleet.lost
            gone, alive = await asyncio.to_thread(psutil.wait_procs, hung, 600)
            assert len(gone) == len(hung) and not alive

    asyncio.run(live())


def test_engines_that_cannot_start_are_told_with_their_cause(tmp_path, tiny_engine_config):
    async def live() -> None:
        async with engines_of(tmp_path / "absent", RLFlowConfig(engine=tiny_engine_config), tmp_path) as engines:
            with pytest.raises(EngineError, match="absent has no config.json|absent is not a folder"):
                await engines.fleet.ready()
            with pytest.raises(EngineError, match="no engine is left to work on: .*absent"):
                await engines.fleet.run(lambda engine: engine.client.metrics())

    asyncio.run(live())
