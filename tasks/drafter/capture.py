"""Capture: a capture engine reads the target's answers and writes the hidden states of every token.

Answers come from another engine: one that captures decodes at a third of the speed, and reads as fast as any.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel

from infra.engine import captures
from infra.engine.answers import Generation
from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.drafter.answers import Answered
from tasks.drafter.states import Captured, StatesWriter
from tasks.drafter.states import Sequence as CapturedSequence

SPARE_BYTES = 2**28  # of the disk, for everything else that writes to it
BATCH_BYTES = 2**28  # of states, that are read by the engine together
AHEAD = 6  # batches on their way: read, waiting for files that come a step late, or being taken
TAKERS = 8  # threads that take the engine's files


class CaptureError(RuntimeError):
    """States that could not be captured, or are not those of the tokens they came with."""


class Layout(BaseModel):
    """What is captured of each token. layer_ids: as `contract.captured_layers`. bytes_per_token: of all of them."""

    layer_ids: list[int]
    bytes_per_token: int


def layer_bytes(target: Path, layers: int, dtype: str) -> int:
    """Bytes of the hidden states of one token: layers * hidden_size * bytes of `dtype`."""
    from transformers import AutoConfig

    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return layers * AutoConfig.from_pretrained(target).get_text_config().hidden_size * size


async def capture(
    handle: EngineHandle,
    answered: Sequence[Answered],
    writer: StatesWriter,
    *,
    bytes_per_token: int,
    budget_bytes: int,
    concurrency: int,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Add each of `answered` with its states to `writer`; how many of them it holds at the end.

    Those that the writer has are passed over, so an interrupted capture goes on where its last shard ended. It stops
    short, and says so by its result, before the states on disk would exceed `budget_bytes`.
    Shards go on being written afterwards, until the writer closes them.
    concurrency: requests in flight. on_progress: called with (sequences done, of all).
    Raises CaptureError when the disk has less room than the states need, at the start or later on, or the budget holds
    none; what was captured stays.
    """
    waiting = [a for a in answered if a.key not in writer.done]
    stored = len(answered) - len(waiting)
    _require_room(writer.folder, min(_bytes(waiting, bytes_per_token), budget_bytes - writer.bytes))
    storing, slots = asyncio.Lock(), asyncio.Semaphore(concurrency)

    async def one(client: EngineClient, answered: Answered) -> Generation:
        async with slots:
            return await client.capture(answered.token_ids, max_new_tokens=1, temperature=0.0, ignore_eos=True)

    async def store(client: EngineClient, batch: list[Answered]) -> None:
        nonlocal stored
        generations = await asyncio.gather(*(one(client, a) for a in batch))
        await client.flush_captures()
        async with storing:
            await asyncio.to_thread(_store, writer, batch, [g.hidden_states_path for g in generations])
        stored += len(batch)
        on_progress(stored, len(answered))

    on_progress(stored, len(answered))
    async with EngineClient(handle) as client:
        running: set[asyncio.Task] = set()
        try:
            for batch in _batches(waiting, bytes_per_token, budget_bytes - writer.bytes, concurrency):
                while len(running) == AHEAD:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)
                # Others write to this disk too. The engine's own files lie there beside the shards for a moment.
                _require_room(writer.folder, 2 * (len(running) + 1) * _bytes(batch, bytes_per_token))
                running.add(asyncio.create_task(store(client, batch)))
            await asyncio.gather(*running)
        finally:  # what has been read is kept, whatever happened to another batch
            await asyncio.gather(*running, return_exceptions=True)
    if not stored:
        raise CaptureError(
            f"{budget_bytes / 2**30:.3f} GiB hold the states of no answer: raise drafter.capture_budget_gib"
        )
    return stored


def _batches(
    waiting: Sequence[Answered], bytes_per_token: int, budget_bytes: int, concurrency: int
) -> Iterator[list[Answered]]:
    """Those that the budget holds, in their order: a few of `concurrency` together, or fewer where they are large."""
    batch, size = [], 0
    for answered in waiting:
        alone = _bytes([answered], bytes_per_token)
        if alone > budget_bytes:
            break
        budget_bytes -= alone
        if batch and (size + alone > BATCH_BYTES or len(batch) == 2 * concurrency):
            yield batch
            batch, size = [], 0
        batch.append(answered)
        size += alone
    if batch:
        yield batch


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free - SPARE_BYTES:
        raise CaptureError(
            f"hidden states need {needed / 2**30:.2f} GiB more, {folder} has {free / 2**30:.2f} GiB free, of which "
            f"{SPARE_BYTES / 2**30:.2f} are left alone: free some, lower drafter.capture_budget_gib, or set "
            f"drafter.stream=true"
        )


def _bytes(answered: Sequence[Answered], bytes_per_token: int) -> int:
    return bytes_per_token * sum(len(a.token_ids) for a in answered)


def _store(writer: StatesWriter, batch: Sequence[Answered], paths: Sequence[Path]) -> None:
    with ThreadPoolExecutor(TAKERS) as takers:
        for captured in takers.map(_take, batch, paths):
            writer.add(captured)


def _take(answered: Answered, path: Path) -> Captured:
    states, token_ids = captures.load(path)
    captures.discard(path)
    if token_ids.tolist() != answered.token_ids:
        raise CaptureError(
            f"the engine captured {len(token_ids)} tokens for a request of {len(answered.token_ids)}, or others: "
            f"{path.name} belongs to another request or is cut short"
        )
    sequence = CapturedSequence(**answered.model_dump())
    return Captured(sequence, states[: sequence.num_states])
