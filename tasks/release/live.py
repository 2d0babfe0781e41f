"""A new release beside the champion, on the same requests: what the fleet counted of both, as evidence."""

import asyncio
import time
from collections.abc import Sequence

from infra.config.release import Golden
from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from infra.serving.client import Fleet
from infra.serving.counters import Counters
from infra.serving.state import SIDE_HEADER, Triple
from tasks.evaluate.evidence import row

PROBES_AT_ONCE = 4
COUNTED_S = 120.0  # the fleet reads its replicas' counters every second, later when the machine is busy
POLL_S = 0.2


def observe(
    fleet: Fleet, stable: Triple, canary: Triple, golden: Sequence[Golden], max_new_tokens: int, *, subject: str
) -> list[dict]:
    """Evidence rows of the requests that both sides answer from now on: those of clients for `fleet.config.hold_s`, and
    `fleet.config.probes` of Lockstep's own to each side.

    live_requests, live_error_share (n = requests of the canary, cut streams among its errors), live_golden and
    live_golden_difference (n = golden questions), live_ttft_p99_ratio (n = answers) and live_itl_p99_ratio (n = gaps),
    the canary's over the champion's, n of the smaller side, and live_acceptance_difference in tokens per pass (n =
    drafts of the canary) where both speculate. Domain: the share of the requests that the canary gets.
    """
    before = {t.key: fleet.pool(t).counters for t in (stable, canary)}
    started, probes = time.monotonic(), max(fleet.config.probes, len(golden))
    right = asyncio.run(_probe_both(fleet.handle, golden, probes, max_new_tokens))
    time.sleep(max(0.0, fleet.config.hold_s - (time.monotonic() - started)))
    was, now = (_since(fleet, triple, before[triple.key], probes) for triple in (stable, canary))
    return rows(was, now, right["stable"], right["canary"], subject=subject, domain=f"{fleet.wish.share}%")


def rows(
    was: Counters, now: Counters, was_right: Sequence[bool], now_right: Sequence[bool], *, subject: str, domain: str
) -> list[dict]:
    """The rows of `observe` from the counters of champion and canary and which golden questions they answered right."""
    labels = dict(subject=subject, domain=domain)
    found = [
        row("live_requests", now.requests, n=now.requests, unit="requests", **labels),
        row("live_error_share", _share(now.errors + now.cut, now), n=now.requests, unit="share", **labels),
    ]
    if now_right:
        n, kept = len(now_right), sum(now_right) / len(now_right)
        found += [
            row("live_golden", kept, n=n, unit="share", **labels),
            row("live_golden_difference", kept - sum(was_right) / n, n=n, unit="share", **labels),
        ]
    for figure, one, other in (("ttft", was.ttft, now.ttft), ("itl", was.itl, now.itl)):
        if one.count and other.count:
            ratio = other.quantile(0.99) / one.quantile(0.99)
            n = min(one.count, other.count)
            found.append(row(f"live_{figure}_p99_ratio", ratio, n=n, unit="ratio", **labels))
    if was.drafts and now.drafts:
        difference = now.accepted / now.drafts - was.accepted / was.drafts
        found.append(row("live_acceptance_difference", difference, n=now.drafts, unit="tokens/pass", **labels))
    return found


async def _probe_both(
    handle: EngineHandle, golden: Sequence[Golden], count: int, max_new_tokens: int
) -> dict[str, list[bool]]:
    sides = ("stable", "canary")
    answers = await asyncio.gather(*(_probe(handle, side, golden, count, max_new_tokens) for side in sides))
    return dict(zip(sides, answers, strict=True))


async def _probe(
    handle: EngineHandle, side: str, golden: Sequence[Golden], count: int, max_new_tokens: int
) -> list[bool]:
    """Whether each golden question was answered right; they are asked in turn until `count` requests are sent."""
    slots = asyncio.Semaphore(PROBES_AT_ONCE)
    async with EngineClient(handle, headers={SIDE_HEADER: side}) as client:

        async def ask(one: Golden) -> bool:
            async with slots:
                said = [{"role": "user", "content": one.question}]
                answer = await client.chat(said, max_tokens=max_new_tokens, temperature=0.0)
                return one.expect.casefold() in answer.text.casefold()

        asked = [golden[i % len(golden)] for i in range(count)]
        return (await asyncio.gather(*map(ask, asked)))[: len(golden)]


def _since(fleet: Fleet, triple: Triple, before: Counters, least: int) -> Counters:
    """What was added to the counters, once `least` requests were."""
    deadline = time.monotonic() + COUNTED_S
    while True:
        added = fleet.pool(triple).counters.plus(before, -1)
        if added.requests >= least or time.monotonic() > deadline:
            return added
        time.sleep(POLL_S)


def _share(part: int, counters: Counters) -> float:
    return part / counters.requests if counters.requests else float(part > 0)
