"""Move a published version into running engines."""

import asyncio
import time
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from infra.engine.client import EngineClient
from infra.engine.errors import EngineError
from infra.transport.base import ParamMeta, Published, SyncError

_POLL_S = 0.01


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
    timeout_s: longest time for the preparation, and for each step of the exchange.
    Raises SyncError naming engine and parameter. If an engine could not prepare the update, all engines keep serving
    the old weights. If an engine's check fails after the exchange, it stays paused: it serves nothing until a later
    update succeeds.
    """
    started = time.monotonic()
    try:
        statuses = await _all(_prepare(client, published, timeout_s) for client in clients)
    except BaseException:
        await asyncio.gather(*(_abandon(client) for client in clients), return_exceptions=True)
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


async def _prepare(client: EngineClient, published: Published, timeout_s: float) -> dict:
    async with _step(client, published, "prepare", timeout_s):
        status = await _status(client)
        if status["sender"] != published.sender:
            await client.init_weight_transfer({"sender": published.sender, "sender_epoch": published.sender_epoch})
        await client.start_weight_update()
        await client.update_weights({"published": published.model_dump()})
        while (status := await _status(client))["state"] == "staging":
            await asyncio.sleep(_POLL_S)
    if status["state"] != "ready":
        raise SyncError(f"{_where(client)} could not take version {published.version}: {status['error']}")
    return status


async def _exchange(
    client: EngineClient, published: Published, in_flight: str, timeout_s: float
) -> tuple[float, float]:
    """Seconds of the pause, and of the checking in it."""
    async with _step(client, published, "exchange", timeout_s):
        started = time.monotonic()
        await client.pause(in_flight)
        await client.finish_weight_update(str(published.version))
        checking = time.monotonic()
        (found,) = await client.collective_rpc("weight_checksums")
        verify_s = time.monotonic() - checking
        _check(client, found, published)
        await client.reset_prefix_cache()
        await client.resume()
        return time.monotonic() - started, verify_s


def _check(client: EngineClient, found: dict[str, dict[str, str]], published: Published) -> None:
    metas: dict[str, ParamMeta] = {meta.name: meta for meta in published.params}
    for name, entry in found.items():
        meta = metas.get(name) or metas.get(entry.get("source", ""))
        if meta is None:
            raise SyncError(f"{_where(client)} computes with {name}, which version {published.version} does not have")
        if entry["checksum"] != meta.checksum:
            raise SyncError(
                f"{_where(client)} computes with a {name} that is not version {published.version}'s: checksum "
                f"{entry['checksum']}, published {meta.checksum}. It stays paused; publish again, or replace it"
            )
    if missing := sorted(set(metas) - set(found)):
        raise SyncError(
            f"{_where(client)} does not report {missing[0]} ({len(missing)} such parameters). It stays paused"
        )


async def _abandon(client: EngineClient) -> None:
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
