"""What measurements of drafters ask of engines that they start themselves."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config.flows import DrafterFlowConfig
from tasks.evaluate.measurement import MeasureError

if TYPE_CHECKING:
    from infra.engine.launch import Engine
    from infra.engine.spec import EngineHandle, EngineSpec
    from tasks.drafter.answers import Answered, Answering
    from tasks.drafter.states_writer import StatesWriter
    from tasks.drafter.traffic import Traffic

MOST = 0.6  # of a GPU's memory, for all engines together: a trainer is there too


@contextmanager
def engines(
    specs: "list[EngineSpec]", folder: Path, say: Callable[[str], None], meanwhile: Callable[[], None] = lambda: None
) -> "Iterator[list[Engine]]":
    """Engines of these specs, started at once: who is not asked costs nothing, and waiting for each start does.
    meanwhile: what this thread does until then."""
    from infra.engine.launch import start

    with ThreadPoolExecutor(len(specs)) as threads, ExitStack() as running:
        starting = [threads.submit(start, _fixed(spec, len(specs)), folder, say) for spec in specs]
        meanwhile()
        wait(starting)
        for started in starting:
            if not started.exception():
                running.enter_context(started.result())
        yield [started.result() for started in starting]


def answering_and_capturing(
    model: Path, config: DrafterFlowConfig, layer_ids: list[int], folder: Path
) -> "list[EngineSpec]":
    """Specs of an engine that answers and of one that captures the states of these layers below `folder`. Both have the
    API of tokens: through the other one the server, not a GPU, would limit how fast they read."""
    from infra.engine.spec import Capture, EngineSpec, Role

    capturing = Capture(layer_ids=layer_ids, folder=folder / "staging")
    return [
        EngineSpec(model=model, role=Role.rollout, config=config.engine),
        EngineSpec(model=model, role=Role.capture, config=config.engine, capture=capturing),
    ]


def _fixed(spec: "EngineSpec", engines: int) -> "EngineSpec":
    """On a GPU with a cache of fixed size, half of what the engine may take: one that measures what is left while
    another starts takes the other's memory for its own."""
    from infra.engine.pin import accelerated

    if not accelerated():
        return spec
    import torch

    config = spec.config
    share = min(config.gpu_memory_fraction, MOST / engines)
    flags = [f"--kv-cache-memory-bytes={int(torch.cuda.mem_get_info()[1] * share / 2)}", *config.extra_flags]
    changed = {"extra_flags": flags, "gpu_memory_fraction": share}
    return spec.model_copy(update={"config": config.model_copy(update=changed)})


def asked(
    target: Path,
    config: DrafterFlowConfig,
    prompts: int | None,
    held_out: int,
    writer: "EngineHandle | None" = None,
) -> "tuple[Traffic, Answering]":
    """Prompts of each source that no run has to give, without later turns, and how they are answered; to measure on,
    `held_out` others of each and the questions of `drafter.benchmarks`, or none.

    prompts: of each source, in place of the numbers in `drafter.traffic`. writer: an engine of the target, which writes
    those of the source `own`; without one they are left out.
    Raises MeasureError when no source can be used.
    """
    from tasks.drafter.answers import Answering
    from tasks.drafter.sources import OWN, RL, ROLLOUTS, own
    from tasks.drafter.template import ChatTemplate
    from tasks.drafter.traffic import Traffic, gather

    settings, template = config.drafter, ChatTemplate(target)
    without = (RL, ROLLOUTS) if writer else (OWN, RL, ROLLOUTS)
    wanted = [
        s.model_copy(update={"prompts": prompts or s.prompts}) for s in settings.traffic if s.source not in without
    ]
    if not wanted:
        raise MeasureError("drafter.traffic has no source of prompts of its own: add one, such as writing or code")
    longest, concurrency, given = settings.max_prompt_tokens, config.engine.max_concurrent_sequences, {}
    if count := sum(source.prompts + held_out for source in wanted if source.source == OWN):
        sampling = dict(max_tokens=longest, concurrency=concurrency, seed=settings.seed)
        given[OWN] = asyncio.run(own.write(writer, template, count, **sampling))
    found = gather(
        wanted,
        template,
        held_out=held_out,
        max_prompt_tokens=longest,
        seed=settings.seed,
        given=given,
        benchmarks=settings.benchmarks if held_out else (),
    )
    first = [prompt.model_copy(update={"later": []}) for prompt in found.train]
    answering = Answering(
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=longest,
        temperature=settings.temperature,
        seed=settings.seed,
        concurrency=concurrency,
    )
    return Traffic(train=first, held_out=found.held_out), answering


def captured(
    handle: "EngineHandle", sequences: "list[Answered]", writer: "StatesWriter", size: int, concurrency: int
) -> float:
    """Tokens per second, written to disk with their checksums."""
    from tasks.drafter.capture import capture

    begun = time.monotonic()
    asyncio.run(capture(handle, sequences, writer, bytes_per_token=size, budget_bytes=2**40, concurrency=concurrency))
    writer.close_shard()
    return sum(len(s.token_ids) for s in sequences) / (time.monotonic() - begun)
