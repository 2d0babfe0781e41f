"""Move a published version into running engines."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Literal

from pydantic import BaseModel, ConfigDict

from infra.engine.client import EngineClient
from infra.engine.errors import EngineError
from infra.transport.base import Published, SyncError

_ABANDON_S = 60.0
_POLL_SHARE = 0.1
"""An engine is asked again after this share of the time it has taken so far: asking takes time from its work."""


class SyncReport(BaseModel):
    """What an update took; of several engines, the slowest.

    prepare_s: from the announcement until every engine had the new weights beside the old ones, read back and compared.
        Engines serve meanwhile. Its parts, as the engine saw them: transfer_s (bytes into the engine's memory),
        finalize_s (joining and packing them as its kernels want them), and the reading back, which is in verify_s.
    pause_s: from the request to pause until the engine had resumed, putting in place and checking included.
    verify_s: reading back, before and during the pause.
    bytes: of one engine.
    """

    model_config = ConfigDict(frozen=True)

    version: int
    prepare_s: float
    pause_s: float
    transfer_s: float
    finalize_s: float
    verify_s: float
    bytes: int


async def sync(
    clients: Sequence[EngineClient],
    published: Published | Sequence[Published],
    *,
    model: Literal["target", "drafter"] = "target",
    in_flight: Literal["keep", "wait", "abort"] = "keep",
    timeout_s: float = 300.0,
) -> SyncReport:
    """Bring every engine to the published version.

    published: one for all engines, or one for each when they are reached over different transports.
    model: whose weights they are: the engines' target, or the drafter that they speculate with.

    Every engine prepares the update while it serves. When all have it, they are paused, exchange their weights, report
    the checksum of every parameter that their model computes with, forget cached prefixes, and resume.

    in_flight: requests that are running are kept (the rest of their tokens comes from the new weights, and so do the
        keys and values of the tokens before), waited for, or aborted.
    timeout_s: longest time for the preparation, for pausing, and for the exchange.
    Raises SyncError naming engine and parameter. If an engine could not prepare the update, all engines keep serving
    the old weights; an engine that could not be paused or could not exchange its weights does so alone. If an engine's
    check fails after the exchange, it stays paused: it serves nothing until a later update succeeds.
    """
    offers = [published] * len(clients) if isinstance(published, Published) else list(published)
    if len(offers) != len(clients) or len({offer.version for offer in offers}) > 1:
        raise ValueError("as many publications as engines are needed, all of one version")
    steps = [_Step(client, offer, model, timeout_s) for client, offer in zip(clients, offers, strict=True)]
    started = time.monotonic()
    try:
        statuses = await _all(step.prepare() for step in steps)
    except BaseException:
        await asyncio.gather(*(step.abandon() for step in steps), return_exceptions=True)
        raise
    prepare_s = time.monotonic() - started
    exchanged = await _all(step.exchange(in_flight) for step in steps)
    return SyncReport(
        version=offers[0].version,
        prepare_s=prepare_s,
        pause_s=max(pause for pause, _ in exchanged),
        transfer_s=max(status["transfer_s"] for status in statuses),
        finalize_s=max(status["finalize_s"] for status in statuses),
        verify_s=max(s["verify_s"] + verify for s, (_, verify) in zip(statuses, exchanged, strict=True)),
        bytes=offers[0].bytes,
    )


async def verify(client: EngineClient, published: Published, model: Literal["target", "drafter"] = "target") -> None:
    """Make sure that an engine computes with the published version: every parameter of its model, as its kernels hold
    it, has the published checksum. Weights only: what it has cached may be older.

    Raises SyncError naming engine and parameter.
    """
    (found,) = await client.collective_rpc("weight_checksums", model=model)
    metas = {meta.name: meta for meta in published.params}
    for name, entry in found.items():
        meta = metas.get(name) or metas.get(entry.get("source", ""))
        if meta is None:
            raise SyncError(f"{_where(client)} computes with {name}, which version {published.version} does not have")
        if entry["checksum"] != meta.checksum:
            raise SyncError(
                f"{_where(client)} computes with another {name} than version {published.version}: checksum "
                f"{entry['checksum']}, published {meta.checksum}; publish a new version, or replace the engine"
            )
    if missing := sorted(set(metas) - set(found)):
        raise SyncError(f"{_where(client)} does not compute with {missing[0]} ({len(missing)} published parameters)")


class _Step:
    """The update of one engine."""

    def __init__(self, client: EngineClient, published: Published, model: str, timeout_s: float) -> None:
        self._client, self._published, self._model, self._timeout_s = client, published, model, timeout_s

    async def prepare(self) -> dict:
        client, published = self._client, self._published
        async with self._bounded("prepare", self._timeout_s):
            status = await _status(client)
            if self._model == "drafter" and not status["has_drafter"]:
                raise SyncError(
                    f"{_where(client)} has no drafter to update: it was started without one, or speculates by n-gram"
                )
            if status["senders"].get(self._model) != published.sender:
                sender = {"sender": published.sender, "sender_epoch": published.sender_epoch, "model": self._model}
                await client.init_weight_transfer(sender)
            started = time.monotonic()
            await client.start_weight_update(draft=self._model == "drafter")
            await client.update_weights({"published": published.model_dump()})
            while (status := await _status(client))["state"] == "staging":
                await asyncio.sleep(_POLL_SHARE * (time.monotonic() - started))
        if status["state"] != "ready":
            raise SyncError(f"{_where(client)} could not take version {published.version}: {status['error']}")
        return status

    async def exchange(self, in_flight: str) -> tuple[float, float]:
        """Seconds of the pause, and of the checking in it."""
        client, published = self._client, self._published
        async with self._bounded("exchange", 2 * self._timeout_s):
            started = time.monotonic()
            await self._pause(in_flight)
            await self._put_in_place()
            checking = time.monotonic()
            await verify(client, published, self._model)
            verify_s = time.monotonic() - checking
            await client.reset_prefix_cache()
            await client.resume()
            return time.monotonic() - started, verify_s

    async def abandon(self) -> None:
        async with self._bounded("abandon", _ABANDON_S):
            await self._client.collective_rpc("abandon_weight_update")

    async def _put_in_place(self) -> None:
        try:
            if self._model == "drafter":  # answers keep the target's version
                await self._client.finish_weight_update(await self._client.weight_version())
            else:
                await self._client.finish_weight_update(str(self._published.version))
        except EngineError:
            if (await _status(self._client))["state"] == "ready":  # undone: the old weights are in place
                await self._let_go_on()
            raise

    async def _pause(self, in_flight: str) -> None:
        try:
            async with self._bounded(f"pause ({in_flight})", self._timeout_s):
                await self._client.pause(in_flight)
        except SyncError:  # requests that are waited for take too long: nothing has changed
            await self._let_go_on()
            raise

    async def _let_go_on(self) -> None:
        await self.abandon()
        await self._client.resume()

    @asynccontextmanager
    async def _bounded(self, what: str, seconds: float):
        """Bounds a part of the update in time and names the engine in its errors."""
        told = f"{_where(self._client)}, version {self._published.version}, step {what}"
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as late:
            raise SyncError(f"{told}: not done after {seconds:.0f} s") from late
        except EngineError as error:
            raise SyncError(f"{told}: {error}") from error


async def _status(client: EngineClient) -> dict:
    (status,) = await client.collective_rpc("weight_transfer_status")
    return status


def _where(client: EngineClient) -> str:
    return f"the engine at {client.handle.url}"


async def _all(steps) -> list:
    """Results in order. Waits for every step, then raises the first error."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
