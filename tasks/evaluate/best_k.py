"""How many tokens to propose: from what was accepted, and what a target pass took."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from tasks.evaluate.evidence import LOAD, row

if TYPE_CHECKING:
    import pandas as pd

MOST_IN_FLIGHT = 2**20


def speedups(rates: Sequence[float], plain_ms: float, speculating_ms: float) -> list[float]:
    """Expected speed over plain decoding when k = 0..len(rates) tokens are proposed.

    rates: unconditional acceptance rate of each position, measured while len(rates) were proposed. plain_ms: a target
    pass without speculation. speculating_ms: a pass with it, drafting included.
    Leviathan et al. 2023 with the measured rates in place of a power of one: E(k) = 1 + sum of the first k rates, the
    cost of a pass taken as linear in k between the two that were measured.
    """
    step = (speculating_ms - plain_ms) / len(rates)
    return [(1 + sum(rates[:k])) * plain_ms / (plain_ms + k * step) for k in range(len(rates) + 1)]


def best_rows(
    rows: Sequence[dict], plain: Sequence[dict], labels: Mapping, prefix: str = "", suffix: str = ""
) -> list[dict]:
    """Rows best_num_speculative_tokens (0: do not speculate) and speedup_at_best over all domains, from the rows of
    `measure` at one concurrency with speculation and without; none where nothing was proposed. n = drafts.

    prefix, suffix: around the figures of `rows`; those of `plain` have `_plain` behind them.
    """
    found = _overall(rows, prefix, suffix)
    without = _overall(plain, prefix, f"{suffix}_plain")
    rates = []
    while (name := f"acceptance_rate_position_{len(rates) + 1}") in found:
        rates.append(found[name]["value"])
    if not rates or "itl_p50" not in found or "itl_p50" not in without:
        return []
    expected = speedups(rates, without["itl_p50"]["value"], found["itl_p50"]["value"])
    best = max(range(len(expected)), key=expected.__getitem__)
    n = found["acceptance_length"]["n"]
    return [
        row(f"{prefix}best_num_speculative_tokens{suffix}", best, n=n, unit="tokens", **labels),
        row(f"{prefix}speedup_at_best{suffix}", expected[best], n=n, unit="ratio", **labels),
    ]


class Proposal(BaseModel):
    """With `concurrency` requests in flight, `num_tokens` proposed tokens should decode `speedup` times as fast as
    none; 0 tokens and 1 where speculation is slower."""

    model_config = ConfigDict(frozen=True)

    concurrency: int
    num_tokens: int
    speedup: float


def proposals(table: "pd.DataFrame", subject: str) -> list[Proposal]:
    """What the evidence about the drafter `subject` proposes, by requests in flight; later measurements count."""
    found: dict[int, Proposal] = {}
    own = table[table["subject"] == subject]
    for prefix in ("", LOAD):
        tokens = own[own["figure"] == f"{prefix}best_num_speculative_tokens"]
        speeds = own[own["figure"] == f"{prefix}speedup_at_best"]
        for (_, best), (_, speed) in zip(tokens.iterrows(), speeds.iterrows(), strict=True):
            c = int(best["concurrency"])
            found[c] = Proposal(concurrency=c, num_tokens=int(best["value"]), speedup=float(speed["value"]))
    return sorted(found.values(), key=lambda p: p.concurrency)


def schedule(found: Sequence[Proposal]) -> list[tuple[int, int, int]]:
    """(from, to, tokens) as `infra.engine.spec.Speculation` takes it: each measured number of requests in flight stands
    for those up to the next one."""
    ordered = sorted(found, key=lambda p: p.concurrency)
    starts = [1, *(p.concurrency for p in ordered[1:])]
    ends = [*(p.concurrency - 1 for p in ordered[1:]), MOST_IN_FLIGHT]
    return [(start, end, p.num_tokens) for start, end, p in zip(starts, ends, ordered, strict=True)]


def _overall(rows: Sequence[dict], prefix: str, suffix: str) -> dict[str, dict]:
    """By plain figure name: over all domains, or the only one."""
    domain = "all" if any(r["domain"] == "all" for r in rows) else rows[0]["domain"]
    return {r["figure"].removeprefix(prefix).removesuffix(suffix): r for r in rows if r["domain"] == domain}
