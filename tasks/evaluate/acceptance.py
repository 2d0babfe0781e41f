"""Acceptance and speed of speculative decoding, measured by the engine that serves it.

Acceptance comes from the engine's own counters, read before and after each domain's prompts, so nothing else may use
the engine meanwhile. With d drafts (target passes that had proposals) of which r_i accepted their i-th token:
acceptance rate at position i = r_i / d, acceptance length = 1 + sum of the rates, the bonus token included.
"""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from infra.config.target import EngineConfig
from infra.engine.answers import SpeculationCounters
from infra.engine.client import EngineClient
from infra.engine.pin import engine_pin, hardware
from infra.engine.spec import EngineHandle
from tasks.evaluate.evidence import row
from tasks.evaluate.loops import fresh_passes, repeated
from tasks.evaluate.paired import Z

KEPT = "plain.json"


class Measurement(BaseModel):
    """rows: evidence. outputs: generated tokens of each prompt, by domain. tokens_per_second: over all domains.
    conditions: digest of prompts, sampling, concurrency, engine and hardware."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    rows: list[dict]
    outputs: dict[str, list[list[int]]]
    tokens_per_second: float
    conditions: str


async def measure(
    handle: EngineHandle,
    prompts_by_domain: Mapping[str, Sequence[Sequence[int]]],
    *,
    subject: str,
    max_new_tokens: int,
    concurrency: int,
    temperature: float = 0.0,
    seed: int = 0,
    engine: EngineConfig | None = None,
    dataset_digest: str = "",
    prefix: str = "",
    suffix: str = "",
) -> Measurement:
    """Answer each domain's prompts (token ids) with `concurrency` requests in flight, one domain after the other.

    Rows, per domain and over "all": acceptance_length, acceptance_rate_position_1..k (n = drafts; none when the engine
    proposed nothing), acceptance_length_without_loops (n = passes that gave no token of a repeated 8-gram),
    tokens_per_second (n = tokens), looped_share (tokens in repeated 8-grams), ttft_p50, ttft_p99, itl_p50, itl_p99 (ms;
    a gap is between arrivals, so tokens accepted together count as one). `prefix` and `suffix` go around every figure's
    name.
    engine: how the engine was started, for the measurement's conditions.
    """
    slots = asyncio.Semaphore(concurrency)
    labels = dict(subject=subject, concurrency=concurrency, dataset_digest=dataset_digest)

    async def answer(client: EngineClient, number: int, prompt: Sequence[int]) -> _Answer:
        async with slots:
            arrivals, sent = [], time.monotonic()
            sampling = dict(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + number)
            async for tokens in client.stream(list(prompt), **sampling):
                arrivals.append((time.monotonic() - sent, tokens))
            return arrivals

    rows, outputs, parts = [], {}, []
    async with EngineClient(handle) as client:
        for domain, prompts in prompts_by_domain.items():
            before, start = await client.speculation(), time.monotonic()
            answers = await asyncio.gather(*(answer(client, i, prompt) for i, prompt in enumerate(prompts)))
            seconds = time.monotonic() - start
            parts.append(_Part(answers, seconds, (await client.speculation()).since(before)))
            outputs[domain] = [[token for _, tokens in arrivals for token in tokens] for arrivals in answers]
            rows += parts[-1].rows(labels | {"domain": domain})
    everything = sum(parts[1:], parts[0])
    if len(parts) > 1:
        rows += everything.rows(labels | {"domain": "all"})
    named = [measured | {"figure": f"{prefix}{measured['figure']}{suffix}"} for measured in rows]
    return Measurement(
        rows=named,
        outputs=outputs,
        tokens_per_second=everything.tokens_per_second,
        conditions=conditions(
            prompts_by_domain,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            temperature=temperature,
            seed=seed,
            engine=engine,
        ),
    )


def conditions(
    prompts_by_domain: Mapping[str, Sequence[Sequence[int]]],
    *,
    max_new_tokens: int,
    concurrency: int,
    temperature: float = 0.0,
    seed: int = 0,
    engine: EngineConfig | None = None,
) -> str:
    """Digest of everything but the model that `measure` with these arguments depends on."""
    prompts = {domain: [list(prompt) for prompt in prompts] for domain, prompts in prompts_by_domain.items()}
    settings = [
        max_new_tokens,
        concurrency,
        temperature,
        seed,
        engine and engine.model_dump(),
        engine_pin(),
        hardware(),
    ]
    listed = json.dumps([prompts, settings], sort_keys=True)
    return "sha256:" + hashlib.sha256(listed.encode()).hexdigest()


def keep(measurement: Measurement, folder: Path) -> None:
    """Write what was measured without speculation into `folder`, evidence of the target or its drafter, for `kept`."""
    (folder / KEPT).write_text(measurement.model_dump_json())


def kept(folder: Path, conditions: str) -> Measurement | None:
    """What `keep` wrote into `folder`, if it was measured under these conditions."""
    file = folder / KEPT
    found = Measurement.model_validate_json(file.read_bytes()) if file.exists() else None
    return found if found and found.conditions == conditions else None


def told(measurement: Measurement) -> str:
    """What was accepted, by domain, in one line."""
    lengths = [r for r in measurement.rows if "acceptance_length" in r["figure"] and "loops" not in r["figure"]]
    return "accepts " + ", ".join(f"{r['domain']} {r['value']:.2f}" for r in lengths) if lengths else "proposed nothing"


def speedup_row(
    with_speculation: Measurement, without: Measurement, *, subject: str, figure: str = "speculation_speedup", **labels
) -> dict:
    """Tokens per second with speculation over those without, on the same prompts at the same concurrency."""
    n = sum(len(tokens) for outputs in with_speculation.outputs.values() for tokens in outputs)
    ratio = with_speculation.tokens_per_second / without.tokens_per_second
    return row(figure, ratio, n=n, unit="ratio", subject=subject, **labels)


def acceptance_rows(counters: SpeculationCounters, labels: dict) -> list[dict]:
    """Rows of one set of counters; none without drafts. The interval of the length takes drafts as independent
    (its variance follows from the rates: P(accepted >= i) is the i-th rate), that of a rate is Wilson's."""
    n = counters.drafts
    if not n:
        return []
    rates, length = counters.acceptance_rates, counters.acceptance_length
    variance = sum((2 * i - 1) * rate for i, rate in enumerate(rates, 1)) - sum(rates) ** 2
    half = Z * math.sqrt(max(variance, 0.0) / n)
    ends = dict(low=length - half, high=length + half)
    rows = [row("acceptance_length", length, n=n, unit="tokens/pass", **ends, **labels)]
    for i, rate in enumerate(rates, 1):
        low, high = wilson(rate, n)
        rows.append(
            row(f"acceptance_rate_position_{i}", rate, low=low, high=high, n=n, unit="share of drafts", **labels)
        )
    return rows


def wilson(share: float, n: int) -> tuple[float, float]:
    """95% score interval of a share observed in n independent trials (Wilson 1927)."""
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return centre - half, centre + half


_Answer = list[tuple[float, list[int]]]  # seconds since the request was sent, and the tokens that arrived then


class _Part:
    """What was measured on some prompts: their answers, the seconds they took together, the counters' increase."""

    def __init__(self, answers: Sequence[_Answer], seconds: float, counters: SpeculationCounters) -> None:
        self.answers, self.seconds, self.counters = list(answers), seconds, counters
        self.tokens = sum(len(tokens) for arrivals in self.answers for _, tokens in arrivals)

    def __add__(self, other: "_Part") -> "_Part":
        one, two = self.counters, other.counters
        positions = zip_longest(one.accepted_per_position, two.accepted_per_position, fillvalue=0)
        counters = SpeculationCounters(
            one.drafts + two.drafts,
            one.draft_tokens + two.draft_tokens,
            one.accepted_tokens + two.accepted_tokens,
            tuple(map(sum, positions)),
        )
        return _Part(self.answers + other.answers, self.seconds + other.seconds, counters)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def _loops(self, labels: dict) -> list[dict]:
        answers = [[tokens for _, tokens in arrivals] for arrivals in self.answers]
        looped = sum(sum(repeated([t for tokens in answer for t in tokens])) for answer in answers)
        rows = [row("looped_share", looped / max(1, self.tokens), n=self.tokens, unit="share", **labels)]
        longest = len(self.counters.accepted_per_position) + 1
        passes = [n for answer in answers for n in fresh_passes(answer, longest)]
        if self.counters.drafts and passes:
            half = Z * float(np.std(passes)) / math.sqrt(len(passes))
            mean = float(np.mean(passes))
            ends = dict(low=mean - half, high=mean + half)
            name, unit = "acceptance_length_without_loops", "tokens/pass"
            rows.append(row(name, mean, n=len(passes), unit=unit, **ends, **labels))
        return rows

    def rows(self, labels: dict) -> list[dict]:
        rows = acceptance_rows(self.counters, labels)
        rows.append(row("tokens_per_second", self.tokens_per_second, n=self.tokens, unit="tokens/s", **labels))
        rows += self._loops(labels)
        times = [[1e3 * seconds for seconds, _ in arrivals] for arrivals in self.answers if arrivals]
        latencies = {"ttft": [t[0] for t in times], "itl": [gap for t in times for gap in np.diff(t)]}
        for figure, values in latencies.items():
            for percent in (50, 99) if values else ():
                value = float(np.percentile(values, percent))
                rows.append(row(f"{figure}_p{percent}", value, n=len(values), unit="ms", **labels))
        return rows
