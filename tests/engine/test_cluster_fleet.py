"""The engines of a run on real vLLM: one is killed, one hangs, one joins, one is drained, and no request is lost."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import pytest
from safetensors.torch import load_file

from infra.cluster.fleet import Fleet
from infra.cluster.session import session
from infra.engine.errors import EngineError
from infra.engine.spec import EngineSpec, Role
from infra.transport.shm import ShmSender
from infra.transport.sync import sync

PROMPT, LONG = [100, 101, 102, 103], 300


def processes_of(url: str) -> list[psutil.Process]:
    """The API server that listens at `url` and everything below it."""
    port = int(url.rsplit(":", 1)[1])
    listening = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    servers = [psutil.Process(pid) for pid in listening if pid]
    return [p for server in servers for p in [server, *server.children(recursive=True)]]


@contextmanager
def fleet_of(spec: EngineSpec, **settings) -> Iterator[tuple[Fleet, list[str]]]:
    """A fleet whose engines get version 7 before they serve, and the lines it tells."""
    lines: list[str] = []
    with ShmSender("float32") as sender:
        weights = load_file(spec.model / "model.safetensors")
        published = sender.publish(7, weights.items())

        async def welcome(client) -> None:
            await sync([client], published)

        yield (
            Fleet(partial(session().engine, spec), capacity=64, welcome=welcome, told=lines.append, **settings),
            lines,
        )


async def generate(count: int, fleet: Fleet, started: asyncio.Event | None = None) -> list:
    """`count` long requests at once. started: set when an engine works on all of them."""

    async def one(engine):
        if started and engine.in_use == count:
            started.set()
        return await engine.client.generate(PROMPT, max_new_tokens=LONG, temperature=1.0, ignore_eos=True)

    return await asyncio.gather(*(fleet.run(one) for _ in range(count)))


def test_requests_outlive_their_engine_and_engines_come_and_go(tiny_llama, tiny_engine_config):
    async def live(fleet: Fleet, lines: list[str]) -> None:
        async with fleet:
            await fleet.resize(1)
            await fleet.ready()
            started = asyncio.Event()
            working = asyncio.create_task(generate(16, fleet, started))
            await started.wait()
            (first,) = fleet.engines
            for process in processes_of(first.client.handle.url):
                process.send_signal(signal.SIGKILL)
            answers = await working
            assert [len(answer.token_ids) for answer in answers] == [LONG] * 16
            assert (fleet.lost, fleet.retried) == (1, 16)
            (second,) = fleet.engines
            assert second.number == 2

            await fleet.resize(2)
            await fleet.ready()
            versions = {version for answer in await generate(4, fleet) for version, _, _ in answer.weight_versions}
            assert versions == {"7"}
            assert [await engine.client.weight_version() for engine in fleet.engines] == ["7", "7"]

            started = asyncio.Event()
            working = asyncio.create_task(generate(16, fleet))
            while sum(engine.in_use for engine in fleet.engines) < 16:
                await asyncio.sleep(0)
            await fleet.resize(1)
            drained = [engine for engine in fleet.engines if engine.draining]
            assert len(drained) == 1 and drained[0].in_use
            assert [len(answer.token_ids) for answer in await working] == [LONG] * 16
            await asyncio.wait_for(drained[0].lost, 60)
            assert (len(fleet.engines), fleet.lost, fleet.retried) == (1, 1, 16)
        assert any(line.startswith("engine 1 is lost") for line in lines)

    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)
    with fleet_of(spec, probe_s=0.5) as (fleet, lines):
        asyncio.run(live(fleet, lines))


def test_an_engine_that_hangs_is_replaced(tiny_llama, tiny_engine_config):
    async def live(fleet: Fleet) -> None:
        async with fleet:
            await fleet.resize(1)
            await fleet.ready()
            started = asyncio.Event()
            working = asyncio.create_task(generate(8, fleet, started))
            await started.wait()
            hung = processes_of(fleet.engines[0].client.handle.url)
            for process in hung:
                os.kill(process.pid, signal.SIGSTOP)
            assert [len(answer.token_ids) for answer in await working] == [LONG] * 8
            assert fleet.lost == 1
            await asyncio.to_thread(psutil.wait_procs, hung, 60)
            assert not any(process.is_running() for process in hung)

    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)
    with fleet_of(spec, probe_s=1.0, stuck_s=3.0) as (fleet, _):
        asyncio.run(live(fleet))


def test_engines_that_cannot_start_are_told_with_their_cause(tmp_path, tiny_engine_config):
    async def live() -> None:
        spec = EngineSpec(model=tmp_path / "absent", role=Role.rollout, config=tiny_engine_config)

        async def welcome(client) -> None: ...

        fleet = Fleet(partial(session().engine, spec), capacity=4, welcome=welcome, told=lambda line: None)
        async with fleet:
            await fleet.resize(1)
            with pytest.raises(EngineError, match="absent is not a folder"):
                await fleet.ready()
            with pytest.raises(EngineError, match="no engine is left to work on: .*absent is not a folder"):
                await fleet.run(lambda engine: engine.client.metrics())

    asyncio.run(live())
