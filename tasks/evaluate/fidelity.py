"""How closely a changed copy of a model (a quant) reproduces its base: both score the base's own answers.

Figures, per domain and over all, n = answer tokens, intervals by resampling whole texts:
- KL(base || copy), nats per token. The engine reports the most likely tokens of each position; those that both report
  are kept and all others are one bucket, which can only lower KL (data processing inequality): it is a lower bound.
- flips: share of positions whose most likely token changed.
- perplexity ratio: exp(mean(nll_copy - nll_base)) on the base's tokens.
- max error: largest |log p_copy - log p_base| of the base's tokens, nats.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.evaluate.evidence import row
from tasks.evaluate.paired import ratio_interval

# Log-probs arrive in float32: what is left of a distribution after its listed tokens is known to about this much.
RESOLUTION = 1e-7


class Text(BaseModel):
    """A prompt with the base's answer. token_ids: both; answer_start: index of the answer's first token, at least 1."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    answer_start: int


class Scored(BaseModel):
    """A model's view of one text: for each answer token its log-prob and the log-probs of the likeliest tokens."""

    model_config = ConfigDict(frozen=True)

    logprobs: list[float]
    top: list[dict[int, float]]


class Difference(BaseModel):
    """What `compare` finds on one text, per answer token. kl in nats; flipped: the likeliest token changed; error:
    log p_copy - log p_base of the base's token, nats."""

    kl: list[float]
    flipped: list[bool]
    error: list[float]


async def score(
    handle: EngineHandle, texts: Mapping[str, Sequence[Text]], *, top_k: int, concurrency: int
) -> dict[str, list[Scored]]:
    """The view that the engine behind `handle` has of `texts` (by domain), `top_k` likeliest tokens a position."""
    slots = asyncio.Semaphore(concurrency)

    async def one(client: EngineClient, text: Text) -> Scored:
        async with slots:
            scores = (await client.score(text.token_ids, top_k=top_k))[text.answer_start - 1 :]
        return Scored(logprobs=[s.logprob for s in scores], top=[s.top for s in scores])

    async with EngineClient(handle) as client:
        domains = await asyncio.gather(*(asyncio.gather(*(one(client, t) for t in some)) for some in texts.values()))
    return dict(zip(texts, map(list, domains), strict=True))


def compare(base: Scored, copy: Scored) -> Difference:
    """`copy` against `base` on one text.

    Raises ValueError when they scored texts of different lengths.
    """
    if len(base.logprobs) != len(copy.logprobs):
        raise ValueError(
            f"base scored {len(base.logprobs)} tokens, its copy {len(copy.logprobs)}: score the same texts"
        )
    pairs = list(zip(base.top, copy.top, strict=True))
    return Difference(
        kl=[divergence(p, q) for p, q in pairs],
        flipped=[max(p, key=p.__getitem__) != max(q, key=q.__getitem__) for p, q in pairs],
        error=[c - b for b, c in zip(base.logprobs, copy.logprobs, strict=True)],
    )


def divergence(base: Mapping[int, float], copy: Mapping[int, float]) -> float:
    """Lower bound of KL(base || copy) in nats, from the log-probs of some tokens of each: those in both are kept, the
    rest of either distribution is one bucket."""
    shared = base.keys() & copy.keys()
    kl = math.fsum(math.exp(base[token]) * (base[token] - copy[token]) for token in shared)
    rest_base, rest_copy = (
        max(1.0 - math.fsum(math.exp(logprobs[token]) for token in shared), RESOLUTION) for logprobs in (base, copy)
    )
    return max(kl + rest_base * math.log(rest_base / rest_copy), 0.0)


def rows(
    base: Mapping[str, Sequence[Scored]],
    copy: Mapping[str, Sequence[Scored]],
    *,
    subject: str,
    seed: int = 0,
    dataset_digest: str = "",
    prefix: str = "quant_",
) -> list[dict]:
    """Evidence rows of `copy` against `base`, both from `score` on the same texts, by domain and over "all"."""
    domains = {d: [compare(b, c) for b, c in zip(base[d], copy[d], strict=True)] for d in base}
    everything = [difference for some in domains.values() for difference in some]
    groups = domains if len(domains) == 1 else domains | {"all": everything}
    return [
        measured
        for domain, differences in groups.items()
        for measured in _rows(
            differences, prefix, seed, dict(subject=subject, domain=domain, dataset_digest=dataset_digest)
        )
    ]


def _rows(differences: Sequence[Difference], prefix: str, seed: int, labels: dict) -> list[dict]:
    tokens = [len(d.kl) for d in differences]
    n = sum(tokens)

    def per_token(sums: Sequence[float]) -> tuple[float, float, float]:
        return math.fsum(sums) / n, *ratio_interval(sums, tokens, seed=seed)

    kl, kl_low, kl_high = per_token([math.fsum(d.kl) for d in differences])
    flips, flips_low, flips_high = per_token([sum(d.flipped) for d in differences])
    ratio, ratio_low, ratio_high = np.exp(per_token([-math.fsum(d.error) for d in differences]))
    worst = max(abs(error) for d in differences for error in d.error)
    return [
        row(f"{prefix}kl", kl, low=kl_low, high=kl_high, n=n, unit="nats/token, lower bound", **labels),
        row(f"{prefix}flips", flips, low=flips_low, high=flips_high, n=n, unit="share of tokens", **labels),
        row(
            f"{prefix}perplexity_ratio",
            float(ratio),
            low=float(ratio_low),
            high=float(ratio_high),
            n=n,
            unit="ratio",
            **labels,
        ),
        row(f"{prefix}max_error", worst, n=n, unit="nats", **labels),
    ]
