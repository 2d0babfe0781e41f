"""The steps that gather prompts. Arguments and results are JSON, so that a finished step is not done again."""

import asyncio

from infra.config.drafter import DrafterConfig
from infra.config.flows import DrafterFlowConfig
from infra.config.target import ClusterConfig, EngineConfig
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.spans import Spans
from infra.store.open import open_store
from infra.store.refs import ArtifactRef
from tasks.drafter import sources
from tasks.drafter.serving import engine, measuring
from tasks.drafter.sources import own
from tasks.drafter.sources.base import Conversation
from tasks.drafter.template import ChatTemplate
from tasks.drafter.traffic import Traffic, gather


@durable(name="gather traffic")
def gather_traffic(config: DrafterConfig, given: dict[str, list[Conversation]], target: ArtifactRef) -> Traffic:
    """Prompts to train on and held-out ones to measure on. given: conversations of sources that a flow provides."""
    return gather(
        [source for source in config.traffic if source.source != sources.ROLLOUTS],
        ChatTemplate(open_store().open(target)),
        held_out=config.eval_prompts,
        max_prompt_tokens=config.max_prompt_tokens,
        seed=config.seed,
        given=given,
        benchmarks=config.benchmarks,
    )


@durable(name="let the target write prompts", pools=["engines"])
def write_prompts(
    target: ArtifactRef, count: int, config: DrafterConfig, engine_config: EngineConfig, cluster: ClusterConfig
) -> list[Conversation]:
    """`count` prompts that the target writes where its chat template expects a user's words."""
    model = open_store().open(target)
    flow = DrafterFlowConfig(drafter=config, engine=engine_config, cluster=cluster)
    with engine(measuring(model, flow), flow, Spans()) as handle:
        return asyncio.run(
            own.write(
                handle,
                ChatTemplate(model),
                count,
                max_tokens=config.max_prompt_tokens,
                concurrency=engine_config.max_concurrent_sequences,
                seed=config.seed,
                on_progress=lambda done, of: report("the target writes prompts", done, of),
            )
        )
