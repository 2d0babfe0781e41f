"""What rollouts get out of an engine: through the pipeline beside the engine alone, and under other settings of it."""

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import RLFlowConfig
from infra.config.rl import VerifiersEnvironment
from infra.config.target import EngineConfig
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture

if TYPE_CHECKING:
    from infra.cluster.fleet import Fleet
    from tasks.rl.environments.base import Problem
    from tasks.rl.environments.chat import Chat

MEDIAN_SHARE, P99_SHARE, P99 = 1 / 8, 1.0, 2.326  # of the longest answer; standard deviations of the 99th percentile
CHAT = "chat defaults"


class RolloutOptions(Section):
    prompts: int = Field(16, ge=1)
    """Prompts, each answered `rl.group_size` times."""
    answer_tokens: int = Field(512, ge=8)
    """Longest answer, tokens. Lengths are lognormal, the median an eighth of it, the 99th percentile the longest."""
    repeats: int = Field(3, ge=1, le=20)
    """Rounds through the pipeline and through the engine alone, in turns; figures are their medians."""
    concurrent: list[int] = Field([], max_length=8)
    """Values of engine.max_concurrent_sequences to try."""
    batched: list[int] = Field([], max_length=8)
    """Values of engine.max_batched_tokens to try."""
    cache: list[float] = Field([], max_length=8)
    """KV caches to try: engine.kv_cache_gib on CPU, engine.gpu_memory_fraction on GPUs."""
    graphs: bool = False
    """Try CUDA graphs too (engine.eager=false)."""


@dataclass(frozen=True)
class Request:
    """One answer to make: of exactly `length` tokens."""

    problem: "Problem"
    prompt: list[int]
    length: int
    seed: int


class RolloutMeasurement:
    """The same requests every time: prompts of the configured environments, lengths and seeds drawn once."""

    help = "Rollout tokens/s through the pipeline beside the engine alone, and a sweep of the engine's settings."
    config = RLFlowConfig
    options = RolloutOptions

    def measure(self, config: RLFlowConfig, options: RolloutOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when the answers do not fit into the engine's context."""
        from transformers import AutoTokenizer

        from infra.store.models import resolve
        from tasks.rl.environments.chat import Chat

        if any(isinstance(e, VerifiersEnvironment) for e in config.rl.environments):
            raise MeasureError("rollouts are measured on prompts of reasoning_gym and jsonl environments")
        model = resolve(config.target.source)
        chat = Chat(AutoTokenizer.from_pretrained(model), config.rl.system_prompt)
        requests = _requests(chat, config, options)
        table: list[dict[str, Any]] = []
        share: list[float] = []
        for name, engine in _settings(config.engine, options):
            say(f"{name}: starting an engine")
            line, found = asyncio.run(_one(model, name, engine, config, requests, options, say, first=not table))
            table.append(line)
            share += found
        return Measured(_rows(table, share, len(requests)), table, _findings(table, share), _pictures(table))


def _requests(chat: "Chat", config: RLFlowConfig, options: RolloutOptions) -> list[Request]:
    from tasks.rl.environments.make import make
    from tasks.rl.environments.problems import Problems

    rl = config.rl
    problems = Problems(rl.environments, make(rl.environments, rl.seed), rl.held_out_share, rl.seed)
    draw = random.Random(rl.seed)
    spread = math.log(P99_SHARE / MEDIAN_SHARE) / P99
    requests = []
    for problem in problems.take(options.prompts):
        prompt = chat.prompt(problem.messages)
        if len(prompt) + options.answer_tokens > config.engine.max_model_len:
            raise MeasureError(
                f"a prompt of {len(prompt)} tokens and --answer-tokens {options.answer_tokens} exceed "
                f"engine.max_model_len={config.engine.max_model_len}: raise it"
            )
        for _ in range(rl.group_size):
            length = options.answer_tokens * MEDIAN_SHARE * math.exp(draw.gauss(0, spread))
            length = min(options.answer_tokens, max(1, round(length)))
            requests.append(Request(problem, prompt, length, draw.getrandbits(63)))
    return requests


def _settings(engine: EngineConfig, options: RolloutOptions) -> list[tuple[str, EngineConfig]]:
    """(name, settings): the configured ones first, then a chat server's, then those to try, one at a time."""
    from infra.engine.pin import accelerated

    def changed(**values: Any) -> EngineConfig:
        together = engine.model_dump() | values
        batched = max(together["max_batched_tokens"], together["max_concurrent_sequences"])  # a token a sequence
        return EngineConfig.model_validate(together | {"max_batched_tokens": batched})

    cache = "gpu_memory_fraction" if accelerated() else "kv_cache_gib"
    found = [("configured", engine)]
    if options.concurrent or options.batched or options.cache or options.graphs:
        sequences, batched = _chat_defaults(engine.tensor_parallel)
        found.append((CHAT, changed(max_concurrent_sequences=sequences, max_batched_tokens=batched)))
    found += [(f"{n} sequences", changed(max_concurrent_sequences=n)) for n in options.concurrent]
    found += [(f"{n} tokens a step", changed(max_batched_tokens=n)) for n in options.batched]
    found += [(f"cache {n:g}", changed(**{cache: n})) for n in options.cache]
    return [*found, ("CUDA graphs", changed(eager=False))] if options.graphs else found


def _chat_defaults(world_size: int) -> tuple[int, int]:
    """(sequences, tokens a step) that vLLM's own API server takes on this machine when nothing is said."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    tokens, sequences = EngineArgs.get_batch_defaults(world_size)
    return sequences[UsageContext.OPENAI_API_SERVER], tokens[UsageContext.OPENAI_API_SERVER]


async def _one(
    model: Path,
    name: str,
    engine: EngineConfig,
    config: RLFlowConfig,
    requests: Sequence[Request],
    options: RolloutOptions,
    say: Callable[[str], None],
    first: bool,
) -> tuple[dict[str, Any], list[float]]:
    """(line of the table, pipeline / engine alone of each round); the latter for the first settings only."""
    from functools import partial

    from infra.cluster.fleet import Fleet
    from infra.cluster.session import session
    from infra.engine.load import LoadMeter
    from infra.engine.spec import EngineSpec, Role
    from tasks.rl.scoring import ScorerPool

    async def welcome(client) -> None: ...

    spec = EngineSpec(model=model, role=Role.rollout, config=engine)
    fleet = Fleet(partial(session().engine, spec), capacity=engine.max_concurrent_sequences, welcome=welcome, told=say)
    scorers = ScorerPool(config.rl.environments, config.rl.seed, processes=config.rl.scorer_processes)
    async with fleet, scorers:
        await fleet.resize(1)
        await fleet.ready()
        await _alone(fleet, requests[: engine.max_concurrent_sequences], engine.max_concurrent_sequences)  # warms up
        alone, through = [], []
        async with LoadMeter(fleet.clients) as load:
            await load.take()
            for number in range(options.repeats):
                say(f"{name}: round {number + 1} of {options.repeats}")
                alone.append(await _alone(fleet, requests, engine.max_concurrent_sequences))
                if first:
                    through.append(await _through(fleet, scorers, requests))
            figures = await load.take()
    return {
        "engine": name,
        "sequences": engine.max_concurrent_sequences,
        "tokens a step": engine.max_batched_tokens,
        "tokens/s": statistics.median(alone),
        "tokens/s, pipeline": statistics.median(through) if through else None,
        "decode share": figures["decode_share"],
        "KV cache peak": figures["kv_cache_peak"],
        "preemptions": figures["preemptions"],
        "prefix hits": figures["prefix_hit_rate"],
    }, [pipeline / direct for pipeline, direct in zip(through, alone, strict=False)]


async def _alone(fleet: "Fleet", requests: Sequence[Request], concurrent: int) -> float:
    """Tokens/s of the engine's client and nothing else."""
    client, slots = fleet.clients[0], asyncio.Semaphore(concurrent)
    await client.reset_prefix_cache()

    async def one(request: Request) -> int:
        async with slots:
            done = await client.generate(
                request.prompt, max_new_tokens=request.length, temperature=1.0, seed=request.seed, ignore_eos=True
            )
        return len(done.token_ids)

    start = time.monotonic()
    return sum(await asyncio.gather(*map(one, requests))) / (time.monotonic() - start)


async def _through(fleet: "Fleet", scorers: Any, requests: Sequence[Request]) -> float:
    """Tokens/s of the same requests as a step makes them: in groups, on the fleet's slots, scored as they finish."""
    await fleet.clients[0].reset_prefix_cache()

    async def group(members: list[Request]) -> int:
        near = await fleet.nearest()

        async def one(request: Request) -> int:
            done = await fleet.run(
                lambda engine: engine.client.generate(
                    request.prompt, max_new_tokens=request.length, temperature=1.0, seed=request.seed, ignore_eos=True
                ),
                near,
            )
            await scorers.score(request.problem.environment, request.problem.index, "")
            return len(done.token_ids)

        return sum(await asyncio.gather(*map(one, members)))

    groups = [list(members) for _, members in itertools.groupby(requests, key=lambda r: r.problem)]
    start = time.monotonic()
    return sum(await asyncio.gather(*map(group, groups))) / (time.monotonic() - start)


def _rows(table: list[dict[str, Any]], share: list[float], n: int) -> list[dict]:
    from tasks.evaluate.evidence import row

    rows = []
    for line in table:
        for figure, column, unit in (
            ("rollout_tokens_per_second", "tokens/s", "tokens/s"),
            ("rollout_pipeline_tokens_per_second", "tokens/s, pipeline", "tokens/s"),
            ("kv_cache_peak", "KV cache peak", "share of the cache"),
            ("preemptions", "preemptions", "preemptions"),
            ("prefix_hit_rate", "prefix hits", "share of prompt tokens"),
        ):
            if line[column] is not None and line[column] == line[column]:
                found = dict(n=n, unit=unit, subject="rollout", domain=line["engine"], concurrency=line["sequences"])
                rows.append(row(figure, float(line[column]), **found))
    low, high = min(share), max(share)
    found = dict(low=low, high=high, n=len(share), unit="share of the engine alone", subject="rollout")
    return [*rows, row("rollout_pipeline_share", statistics.median(share), **found)]


def _findings(table: list[dict[str, Any]], share: list[float]) -> list[str]:
    first, best = table[0], max(table, key=lambda line: line["tokens/s"])
    found = [
        f"Through the pipeline {first['tokens/s, pipeline']:.0f} tokens/s, the same engine alone "
        f"{first['tokens/s']:.0f} with the same requests: {statistics.median(share):.1%} "
        f"(rounds {min(share):.1%} to {max(share):.1%})."
    ]
    chat = next((line for line in table if line["engine"] == CHAT), None)
    if chat:
        times = best["tokens/s"] / chat["tokens/s"]
        found.append(
            f"Fastest: {best['engine']}, {best['tokens/s']:.0f} tokens/s, {times:.2f} times a chat server's "
            f"defaults ({chat['sequences']} sequences, {chat['tokens a step']} tokens a step)."
        )
    return found


def _pictures(table: list[dict[str, Any]]) -> list[Picture]:
    points = sorted({(float(line["sequences"]), line["tokens/s"]) for line in table})
    if len(points) < 2:
        return []
    return [Picture("Rollouts by concurrency", "sequences at once", "tokens/s", [Line("tokens/s", points)], log_x=True)]


MEASUREMENT = RolloutMeasurement()
