"""What rollouts get out of an engine: through the pipeline beside the engine alone, and under other settings of it."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import RLFlowConfig
from infra.config.rl import VerifiersEnvironment
from infra.engine.errors import EngineError
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture
from tasks.rl.lengths import Lengths
from tasks.rl.sweep import CHAT, CONFIGURED, WITHIN, Setting, flags, proposed, settings, together

if TYPE_CHECKING:
    from infra.cluster.fleet import Fleet
    from tasks.rl.environments.base import Problem
    from tasks.rl.environments.chat import Chat

WARM_UP_TOKENS = 32


class RolloutOptions(Section):
    prompts: int = Field(16, ge=1)
    """Prompts, each answered `rl.group_size` times."""
    answer_tokens: int = Field(512, ge=8)
    """Longest answer, tokens. Lengths are lognormal: the median a twelfth of it, the 99th percentile ten medians."""
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
    sweep: bool = False
    """Try values round the configured ones for each of these that is not given, then the best together."""


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
        """Settings that an engine does not start with are left out and said.

        Raises MeasureError when the answers do not fit into the engine's context, or are too few for --concurrent, and
        EngineError when the configured engine does not start.
        """
        from transformers import AutoTokenizer

        from infra.store.models import resolve
        from tasks.rl.environments.chat import Chat

        if any(isinstance(e, VerifiersEnvironment) for e in config.rl.environments):
            raise MeasureError("rollouts are measured on prompts of reasoning_gym and jsonl environments")
        model = resolve(config.target.source)
        chat = Chat(AutoTokenizer.from_pretrained(model), config.rl.system_prompt)
        requests = _requests(chat, config, options)
        if (most := max([0, *options.concurrent])) > len(requests):
            raise MeasureError(
                f"--concurrent {most} makes no difference to {len(requests)} requests: raise --prompts or rl.group_size"
            )
        table: list[dict[str, Any]] = []
        measured: list[tuple[Setting, float]] = []
        share: list[float] = []
        left_out: list[str] = []

        def one(setting: Setting) -> None:
            say(f"{setting.name}: starting an engine")
            try:
                line, found = asyncio.run(_one(model, setting, config, requests, options, say, first=not table))
            except EngineError as error:
                if not table:
                    raise
                left_out.append(f"Left out, {setting.name}: {str(error).splitlines()[0]}")
                return
            say(f"{setting.name}: {line['tokens/s']:.0f} tokens/s")
            table.append(line)
            measured.append((setting, line["tokens/s"]))
            share.extend(found)

        for setting in settings(config.engine, options, len(requests)):
            one(setting)
        if best := together(measured):
            one(best)
        found = _findings(table, share, measured) + left_out
        return Measured(_rows(table, share, len(requests)), table, found, _pictures(measured))


def _requests(chat: "Chat", config: RLFlowConfig, options: RolloutOptions) -> list[Request]:
    from tasks.rl.environments.make import make
    from tasks.rl.environments.problems import Problems

    rl = config.rl
    problems = Problems(rl.environments, make(rl.environments, rl.seed), rl.held_out_share, rl.seed)
    draw, lengths = random.Random(rl.seed), Lengths(options.answer_tokens)
    requests = []
    for problem in problems.take(options.prompts):
        prompt = chat.prompt(problem.messages)
        if len(prompt) + options.answer_tokens > config.engine.max_model_len:
            raise MeasureError(
                f"a prompt of {len(prompt)} tokens and --answer-tokens {options.answer_tokens} exceed "
                f"engine.max_model_len={config.engine.max_model_len}: raise it"
            )
        for _ in range(rl.group_size):
            seed = draw.getrandbits(63)
            requests.append(Request(problem, prompt, lengths(seed), seed))
    return requests


async def _one(
    model: Path,
    setting: Setting,
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
    from infra.engine.pin import accelerated
    from infra.engine.spec import EngineSpec, Role
    from tasks.rl.scoring import ScorerPool

    async def welcome(client) -> None: ...

    name, engine = setting.name, setting.engine
    spec = EngineSpec(model=model, role=Role.rollout, config=engine)
    fleet = Fleet(partial(session().engine, spec), capacity=engine.max_concurrent_sequences, welcome=welcome, told=say)
    scorers = ScorerPool(config.rl.environments, config.rl.seed, processes=config.rl.scorer_processes)
    async with fleet, scorers:
        await fleet.resize(1)
        await fleet.ready()
        await _alone(fleet, _short(requests, engine.max_concurrent_sequences), engine.max_concurrent_sequences)
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
        "cache": f"{engine.gpu_memory_fraction:.0%} GPU" if accelerated() else f"{engine.kv_cache_gib:g} GiB",
        "graphs": "no" if engine.eager else "yes",
        "tokens/s": statistics.median(alone),
        "tokens/s, low": min(alone),
        "tokens/s, high": max(alone),
        "tokens/s, pipeline": statistics.median(through) if through else None,
        "decode share": figures["decode_share"],
        "KV cache peak": figures["kv_cache_peak"],
        "preemptions": figures["preemptions"] / (len(alone) + len(through)),
        "prefix hits": figures["prefix_hit_rate"],
    }, [pipeline / direct for pipeline, direct in zip(through, alone, strict=False)]


def _short(requests: Sequence[Request], count: int) -> list[Request]:
    """The first `count` with short answers, to warm an engine up: kernels are compiled on first use."""
    return [replace(request, length=min(request.length, WARM_UP_TOKENS)) for request in requests[:count]]


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
            ("preemptions", "preemptions", "preemptions a round"),
            ("prefix_hit_rate", "prefix hits", "share of prompt tokens"),
        ):
            if line[column] is not None and line[column] == line[column]:
                found = dict(n=n, unit=unit, subject="rollout", domain=line["engine"], concurrency=line["sequences"])
                found |= dict(low=line["tokens/s, low"], high=line["tokens/s, high"]) if column == "tokens/s" else {}
                rows.append(row(figure, float(line[column]), **found))
    low, high = min(share), max(share)
    found = dict(low=low, high=high, n=len(share), unit="share of the engine alone", subject="rollout")
    return [*rows, row("rollout_pipeline_share", statistics.median(share), **found)]


def _findings(table: list[dict[str, Any]], share: list[float], measured: Sequence[tuple[Setting, float]]) -> list[str]:
    first = table[0]
    found = [
        f"Through the pipeline {first['tokens/s, pipeline']:.0f} tokens/s, the same engine alone "
        f"{first['tokens/s']:.0f} with the same requests: {statistics.median(share):.1%} "
        f"(rounds {min(share):.1%} to {max(share):.1%})."
    ]
    chat = next((line for line in table if line["engine"] == CHAT), None)
    if chat is None:
        return found
    setting, speed = proposed(measured)
    given = flags(setting, measured[0][0].engine)
    line = next(line for line in table if line["engine"] == setting.name)
    peak = line["KV cache peak"]
    full = f" and {peak:.0%} of the KV cache at its fullest" if peak == peak else ""  # a short run is not looked at
    return [
        *found,
        f"Proposed for rollouts: {given or 'the configured settings'}. {speed:.0f} tokens/s, "
        f"{speed / chat['tokens/s']:.2f} times a chat server's defaults ({chat['sequences']} sequences, "
        f"{chat['tokens a step']} tokens a step) and {speed / first['tokens/s']:.2f} times the configured ones, with "
        f"{line['preemptions']:g} preemptions a round (chat: {chat['preemptions']:g}){full}. Speeds within "
        f"{WITHIN:.0%} count as equal.",
    ]


def _pictures(measured: Sequence[tuple[Setting, float]]) -> list[Picture]:
    """Speed by each knob with the others as configured, where several values were tried."""
    pictures = []
    for knob, title, label in (
        ("max_concurrent_sequences", "Rollouts by concurrency", "sequences at once"),
        ("max_batched_tokens", "Rollouts by the size of an engine step", "tokens a step"),
    ):
        own = [(setting, speed) for setting, speed in measured if setting.knob == knob or setting.name == CONFIGURED]
        points = sorted((float(getattr(setting.engine, knob)), speed) for setting, speed in own)
        if len(points) > 1:
            pictures.append(Picture(title, label, "tokens/s", [Line("tokens/s", points)], log_x=True))
    return pictures


MEASUREMENT = RolloutMeasurement()
