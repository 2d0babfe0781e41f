"""Move a published version into running engines."""

import asyncio
import time
from collections.abc import Sequence
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
        finalize_s (packing for its kernels), and the reading back, which is in verify_s.
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
    published: Published,
    *,
    in_flight: Literal["keep", "wait", "abort"] = "keep",
    timeout_s: float = 300.0,
) -> SyncReport:
    """Bring every engine to the published version.

    Every engine prepares the update while it serves. When all have it, they are paused, exchange their weights, report
    the checksum of every parameter that their model computes with, forget cached prefixes, and resume.

    in_flight: requests that are running are kept (the rest of their tokens comes from the new weights, and so do the
        keys and values of the tokens before), waited for, or aborted.
    timeout_s: longest time for the preparation, for pausing, and for the exchange.
    Raises SyncError naming engine and parameter. If an engine could not prepare the update, all engines keep serving
    the old weights; an engine that could not be paused in time does so alone. If an engine's check fails after the
    exchange, it stays paused: it serves nothing until a later update succeeds.
    """
    started = time.monotonic()
    try:
        statuses = await _all(_prepare(client, published, timeout_s) for client in clients)
    except BaseException:
        await asyncio.gather(*(_abandon(client, published) for client in clients), return_exceptions=True)
        raise
    prepare_s = time.monotonic() - started
    exchanged = await _all(_exchange(client, published, in_flight, timeout_s) for client in clients)
    return SyncReport(
        version=published.version,
        prepare_s=prepare_s,
        pause_s=max(pause for pause, _ in exchanged),
        transfer_s=max(status["transfer_s"] for status in statuses),
        finalize_s=max(status["finalize_s"] for status in statuses),
        verify_s=max(s["verify_s"] + verify for s, (_, verify) in zip(statuses, exchanged, strict=True)),
        bytes=published.bytes,
    )


async def verify(client: EngineClient, published: Published) -> None:
    """Make sure that an engine computes with the published version: every parameter of its model, as its kernels hold
    it, has the published checksum. Weights only: what it has cached may be older.

    Raises SyncError naming engine and parameter.
    """
    (found,) = await client.collective_rpc("weight_checksums")
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


async def _prepare(client: EngineClient, published: Published, timeout_s: float) -> dict:
    async with _step(client, published, "prepare", timeout_s):
        status = await _status(client)
        if status["sender"] != published.sender:
            await client.init_weight_transfer({"sender": published.sender, "sender_epoch": published.sender_epoch})
        started = time.monotonic()
        await client.start_weight_update()
        await client.update_weights({"published": published.model_dump()})
        while (status := await _status(client))["state"] == "staging":
            await asyncio.sleep(_POLL_SHARE * (time.monotonic() - started))
    if status["state"] != "ready":
        raise SyncError(f"{_where(client)} could not take version {published.version}: {status['error']}")
    return status


async def _exchange(
    client: EngineClient, published: Published, in_flight: str, timeout_s: float
) -> tuple[float, float]:
    """Seconds of the pause, and of the checking in it."""
    async with _step(client, published, "exchange", 2 * timeout_s):
        started = time.monotonic()
        await _pause(client, published, in_flight, timeout_s)
        await client.finish_weight_update(str(published.version))
        checking = time.monotonic()
        await verify(client, published)
        verify_s = time.monotonic() - checking
        await client.reset_prefix_cache()
        await client.resume()
        return time.monotonic() - started, verify_s


async def _pause(client: EngineClient, published: Published, in_flight: str, timeout_s: float) -> None:
    try:
        async with _step(client, published, f"pause ({in_flight})", timeout_s):
            await client.pause(in_flight)
    except SyncError:  # requests that are waited for take too long: nothing has changed, so let them go on
        await _abandon(client, published)
        await client.resume()
        raise


async def _abandon(client: EngineClient, published: Published) -> None:
    async with _step(client, published, "abandon", _ABANDON_S):
        await client.collective_rpc("abandon_weight_update")


async def _status(client: EngineClient) -> dict:
    (status,) = await client.collective_rpc("weight_transfer_status")
    return status


def _where(client: EngineClient) -> str:
    return f"the engine at {client.handle.url}"


class _step:
    """Bounds a step in time and names the engine in its errors."""

    def __init__(self, client: EngineClient, published: Published, what: str, timeout_s: float) -> None:
        self._told = f"{_where(client)}, version {published.version}, step {what}"
        self._seconds = timeout_s
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind, error, traceback) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            raise SyncError(f"{self._told}: not done after {self._seconds:.0f} s") from late
        if isinstance(error, EngineError):
            raise SyncError(f"{self._told}: {error}") from error


async def _all(steps) -> list:
    """Results in order. Waits for every step, then raises the first error."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
