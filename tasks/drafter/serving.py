"""Engines of the drafter's steps, and what is asked of them."""

import asyncio
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
from tasks.evaluate import under_load
from tasks.evaluate.acceptance import Measurement, measure


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
    """The held-out prompts answered greedily with each of `load_concurrency` requests in flight."""
    return asyncio.run(
        under_load.measure_under_load(
            handle,
            traffic.held_out_ids(),
            config.drafter.load_concurrency,
            subject=subject,
            max_new_tokens=config.drafter.max_new_tokens,
            seed=config.drafter.seed,
            engine=config.engine,
            dataset_digest=traffic.held_out_digest(),
            suffix=suffix,
        )
    )


async def replay(handle: EngineHandle, expected: Expected, concurrency: int) -> Walk:
    """What an engine accepts while it answers captured prompts once more, greedily, so many at once. Nothing else may
    use it then."""
    slots = asyncio.Semaphore(concurrency)

    async def again(client: EngineClient, prompt: list[int], count: int) -> None:
        async with slots:
            await client.generate(prompt, max_new_tokens=count, temperature=0.0, logprobs=False)

    async with EngineClient(handle) as client:
        before = await client.speculation()
        asked = zip(expected.prompts, expected.num_new_tokens, strict=True)
        await asyncio.gather(*(again(client, *one) for one in asked))
        counted = (await client.speculation()).since(before)
    return Walk(counted.drafts, list(counted.accepted_per_position))
