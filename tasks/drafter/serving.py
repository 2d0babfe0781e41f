"""Engines of the drafter's steps, and what is asked of them."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infra.cluster.placement import Placement, place
from infra.cluster.session import session
from infra.config.flows import DrafterFlowConfig
from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle, EngineSpec, Role, Speculation
from infra.services.progress import report
from infra.services.spans import Spans
from tasks.drafter.traffic import Traffic
from tasks.drafter.walk import Walk
from tasks.drafter.worker import Expected
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


def measuring(model: Path, config: DrafterFlowConfig, speculation: Speculation | None = None) -> EngineSpec:
    """The engine that measures `model`: the same with and without speculation."""
    return EngineSpec(
        model=model, role=Role.eval, config=config.engine, speculation=speculation, seed=config.drafter.seed
    )


def placement(config: DrafterFlowConfig) -> Placement:
    """What engines and the trainer reserve."""
    return place(config.cluster, config.engine, session().resources())


def measure_held_out(handle: EngineHandle, traffic: Traffic, config: DrafterFlowConfig, **labels: str) -> Measurement:
    """Acceptance and speed of an engine on the held-out prompts, answered greedily. labels: of `measure`."""
    return asyncio.run(
        measure(
            handle,
            traffic.held_out_ids(),
            max_new_tokens=config.drafter.max_new_tokens,
            concurrency=config.drafter.eval_concurrency,
            seed=config.drafter.seed,
            engine=config.engine,
            dataset_digest=traffic.held_out_digest(),
            **labels,
        )
    )


async def replay(handle: EngineHandle, expected: Expected) -> Walk:
    """What an engine accepts while it answers captured prompts once more, greedily. Nothing else may use it then."""
    async with EngineClient(handle) as client:
        before = await client.speculation()
        for prompt, count in zip(expected.prompts, expected.num_new_tokens, strict=True):
            await client.generate(prompt, max_new_tokens=count, temperature=0.0)
        counted = (await client.speculation()).since(before)
    return Walk(counted.drafts, list(counted.accepted_per_position))
