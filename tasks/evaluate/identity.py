"""Whether speculation leaves greedy output as it is, against the noise of two runs without it.

Speculation that is lossless on paper still changes some greedy answers: a target pass over several tokens rounds
otherwise than a pass over one, and where two tokens are about as likely the other one wins. From there on the answer is
another one. Decoding the same prompts twice does not show that noise where every pass rounds alike, as on CPU. So the
second run without speculation reads each answer in one pass, as a target verifies proposals, and says which token it
would have given at each place. Rounding tells on both runs alike; wrong proposals that are accepted tell on one alone.
"""

import asyncio
from collections.abc import Mapping, Sequence

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.evaluate.evidence import row
from tasks.evaluate.paired import share_difference_row

Outputs = Mapping[str, Sequence[Sequence[int]]]  # by domain, generated token ids of each prompt


async def read_again(
    handle: EngineHandle, prompts: Outputs, outputs: Outputs, *, concurrency: int
) -> dict[str, list[list[int]]]:
    """The likeliest token at each place of the answers `outputs`, as the engine behind `handle` finds it when it reads
    prompt and answer in one pass: the second run of a model without speculation that gave `outputs`.

    concurrency: requests in flight.
    """
    slots = asyncio.Semaphore(concurrency)

    async def read(client: EngineClient, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        if not answer:
            return []
        async with slots:
            scores = (await client.score([*prompt, *answer], top_k=1))[len(prompt) - 1 :]
        best = (max(score.top, key=lambda token: (score.top[token], token == score.token_id)) for score in scores)
        return list(best)

    async with EngineClient(handle) as client:
        return {
            domain: await asyncio.gather(*(read(client, p, a) for p, a in zip(prompts[domain], answers, strict=True)))
            for domain, answers in outputs.items()
        }


def identity_rows(
    without: Outputs,
    with_speculation: Outputs,
    *,
    again: Outputs | None = None,
    subject: str,
    prefix: str = "",
    **labels,
) -> list[dict]:
    """Evidence rows of answers to the same prompts at temperature 0, per domain, n = prompts.

    output_identity: share of prompts that `with_speculation` answers with the same tokens as `without`.
    output_agreement: mean share of an answer's tokens before the first that differs.
    Where `again` is given, a second run without speculation, output_identity_noise: its identity; and, also over "all"
    domains, output_identity_difference: identity less its noise, paired by prompt, with its 95% interval. Lossless
    speculation has 0 there, however noisy the engine is.
    Raises ValueError when the numbers of answers differ.
    """
    figures = {"output_identity": (_identity, with_speculation), "output_agreement": (_agreement, with_speculation)}
    if again is not None:
        figures["output_identity_noise"] = (_identity, again)
    shares = {
        (figure, domain): _each(share, without[domain], other[domain])
        for domain in without
        for figure, (share, other) in figures.items()
    }
    labels = dict(unit="share", subject=subject, **labels)
    rows = [
        row(f"{prefix}{figure}", sum(some) / len(some), n=len(some), domain=domain, **labels)
        for (figure, domain), some in shares.items()
    ]
    if again is not None:
        named = {domain: [domain] for domain in without} | {"all": list(without)}
        for name, some in named.items():
            noise, kept = (
                [bool(same) for domain in some for same in shares[figure, domain]]
                for figure in ("output_identity_noise", "output_identity")
            )
            rows.append(share_difference_row(f"{prefix}output_identity_difference", noise, kept, domain=name, **labels))
    return rows


def _each(share, one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[float]:
    if len(one) != len(other):
        raise ValueError(f"{len(one)} answers against {len(other)}: compare runs on the same prompts")
    return [share(a, b) for a, b in zip(one, other, strict=True)]


def _identity(a: Sequence[int], b: Sequence[int]) -> float:
    return float(list(a) == list(b))


def _agreement(a: Sequence[int], b: Sequence[int]) -> float:
    longest = max(len(a), len(b))
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return first / longest if longest else 1.0
