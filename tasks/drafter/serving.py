"""Engines of the drafter's steps, and what is asked of them."""

import asyncio
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infra.cluster.placement import Placement, place
from infra.cluster.session import session
from infra.config.flows import DrafterFlowConfig
from infra.engine.client import EngineClient
from infra.engine.spec import Capture, EngineHandle, EngineSpec, Role, Speculation
from infra.services.progress import report
from infra.services.spans import Spans
from tasks.drafter.capture import Layout, layer_bytes
from tasks.drafter.contract import captured_layers
from tasks.drafter.traffic import Traffic
from tasks.drafter.walk import Walk
from tasks.drafter.worker import Expected
from tasks.evaluate.acceptance import Measurement, measure
from tasks.evaluate.evidence import LOAD


@contextmanager
def engine(spec: EngineSpec, config: DrafterFlowConfig, spans: Spans) -> Iterator[EngineHandle]:
    """An engine for as long as the context is open; its start counts as `engine_start`."""
    with ExitStack() as stack:
        with spans.measure("engine_start"):
            report(f"starting the {spec.role} engine")
            reserve = placement(config).engine
            handle = stack.enter_context(session().engine(spec, reserve=reserve, progress=report))
        yield handle


@contextmanager
def capturing(
    model: Path, folder: Path, config: DrafterFlowConfig, spans: Spans
) -> Iterator[tuple[EngineHandle, Layout]]:
    """A capture engine for `model` that writes into `folder`/staging; the time inside counts as `engine`."""
    layer_ids, staging = captured_layers(model), folder / "staging"
    layout = Layout(layer_ids=layer_ids, bytes_per_token=layer_bytes(model, len(layer_ids), config.engine.dtype))
    shutil.rmtree(staging, ignore_errors=True)  # what an interrupted engine left belongs to no request any more
    spec = EngineSpec(
        model=model, role=Role.capture, config=config.engine, capture=Capture(layer_ids=layer_ids, folder=staging)
    )
    with engine(spec, config, spans) as handle, spans.measure("engine"):
        yield handle, layout


def measuring(model: Path, config: DrafterFlowConfig, speculation: Speculation | None = None) -> EngineSpec:
    """The engine that measures `model`: the same with and without speculation."""
    return EngineSpec(
        model=model, role=Role.eval, config=config.engine, speculation=speculation, seed=config.drafter.seed
    )


def placement(config: DrafterFlowConfig) -> Placement:
    """What engines and the trainer reserve."""
    return place(config.cluster, config.engine, session().resources())


def measure_held_out(
    handle: EngineHandle, traffic: Traffic, config: DrafterFlowConfig, *, temperature: float = 0.0, **labels: str
) -> Measurement:
    """Acceptance and speed of an engine on the held-out prompts, by default answered greedily. labels: of `measure`."""
    return asyncio.run(
        measure(
            handle,
            traffic.held_out_ids(),
            max_new_tokens=config.drafter.max_new_tokens,
            concurrency=config.drafter.eval_concurrency,
            temperature=temperature,
            seed=config.drafter.seed,
            engine=config.engine,
            dataset_digest=traffic.held_out_digest(),
            **labels,
        )
    )


def measure_under_load(
    handle: EngineHandle, traffic: Traffic, config: DrafterFlowConfig, *, subject: str, suffix: str = ""
) -> list[Measurement]:
    """For each of `load_concurrency` the held-out prompts of all domains together, answered greedily; asked again until
    there are twice as many requests as are in flight."""
    prompts, measured = [ids for some in traffic.held_out_ids().values() for ids in some], []
    for concurrency in config.drafter.load_concurrency:
        report(f"measuring with {concurrency} requests in flight")
        times = max(1, math.ceil(2 * concurrency / len(prompts)))
        measured.append(
            asyncio.run(
                measure(
                    handle,
                    {"all": prompts * times},
                    subject=subject,
                    max_new_tokens=config.drafter.max_new_tokens,
                    concurrency=concurrency,
                    seed=config.drafter.seed,
                    engine=config.engine,
                    dataset_digest=traffic.held_out_digest(),
                    prefix=LOAD,
                    suffix=suffix,
                )
            )
        )
    return measured


async def replay(handle: EngineHandle, expected: Expected, concurrency: int) -> Walk:
    """What an engine accepts while it answers captured prompts once more, greedily, so many at once. Nothing else may
    use it then."""
    slots = asyncio.Semaphore(concurrency)

    async def again(client: EngineClient, prompt: list[int], count: int) -> None:
        async with slots:
            await client.generate(prompt, max_new_tokens=count, temperature=0.0)

    async with EngineClient(handle) as client:
        before = await client.speculation()
        asked = zip(expected.prompts, expected.num_new_tokens, strict=True)
        await asyncio.gather(*(again(client, *one) for one in asked))
        counted = (await client.speculation()).since(before)
    return Walk(counted.drafts, list(counted.accepted_per_position))
