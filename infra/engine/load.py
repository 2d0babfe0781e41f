"""How loaded engines are: what they did with their time and their cache between two looks."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infra.engine.client import EngineClient
from infra.engine.errors import EngineGone

POLL_S = 0.5
USAGE = "vllm:kv_cache_usage_perc"
_COUNTED = {  # seconds, but for preemptions (times) and the prefix cache (tokens)
    "queue": "vllm:request_queue_time_seconds_sum",
    "prefill": "vllm:request_prefill_time_seconds_sum",
    "decode": "vllm:request_decode_time_seconds_sum",
    "preemptions": "vllm:num_preemptions_total",
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
}


class LoadMeter:
    """Watches engines while they sample. Use as an async context manager.

    clients: entered; the list may change, and an engine that does not answer is left out: who waits for its answers
    finds out why.
    """

    def __init__(self, clients: Sequence[EngineClient]):
        self._clients = clients
        self._counted: dict[str, dict[str, float]] = {}
        self._peak = 0.0
        self._busy_s, self._since, self._working = 0.0, time.monotonic(), 0

    async def __aenter__(self) -> "LoadMeter":
        await self._look()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the engines have something to do."""
        self._pass_time()
        self._working += 1
        try:
            yield
        finally:
            self._pass_time()
            self._working -= 1

    async def take(self) -> dict[str, float]:
        """Figures since the last call, over all engines; NaN where there was nothing to measure.

        engine_busy_s: seconds in which at least one block of `working` was open.
        decode_share: decoding / (waiting, prefilling and decoding), of the requests that ended, in seconds.
        kv_cache_peak: largest share of an engine's KV cache that was in use, looked at twice a second.
        preemptions: times a running request lost its cache, to another one or to a weight update.
        prefix_hit_rate: prompt tokens found in the prefix cache / asked for.
        """
        changed = await self._look()
        self._pass_time()
        time_in_engine = changed["queue"] + changed["prefill"] + changed["decode"]
        figures = {
            "engine_busy_s": self._busy_s,
            "decode_share": _ratio(changed["decode"], time_in_engine),
            "kv_cache_peak": self._peak or float("nan"),
            "preemptions": changed["preemptions"],
            "prefix_hit_rate": _ratio(changed["hits"], changed["queries"]),
        }
        self._busy_s, self._peak = 0.0, 0.0
        return figures

    async def _watch(self) -> None:
        while True:
            for samples in await self._samples():
                self._peak = max(self._peak, samples[1].get(USAGE, 0.0))
            await asyncio.sleep(POLL_S)

    async def _look(self) -> dict[str, float]:
        """Increase of each counter since the last look."""
        changed = dict.fromkeys(_COUNTED, 0.0)
        for url, samples in await self._samples():
            now = {name: samples.get(sample, 0.0) for name, sample in _COUNTED.items()}
            before = self._counted.get(url, {})
            self._counted[url] = now
            for name, value in now.items():
                changed[name] += value - before.get(name, 0.0)
        return changed

    async def _samples(self) -> list[tuple[str, dict[str, float]]]:
        clients = list(self._clients)
        answers = await asyncio.gather(*(client.metrics() for client in clients), return_exceptions=True)
        found = []
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, EngineGone):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found.append((client.handle.url, answer))
        return found

    def _pass_time(self) -> None:
        now = time.monotonic()
        if self._working:
            self._busy_s += now - self._since
        self._since = now


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
