"""Capture: a capture engine reads the target's answers and writes the hidden states of every token.

Answers come from another engine: one that captures decodes at a third of the speed, and reads as fast as any.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
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
    concurrency: requests in flight. on_progress: called with (sequences done, of all).
    Raises CaptureError when the disk has less room than the states need, at the start or later on, or the budget holds
    none; what was captured stays.
    """
    waiting = [a for a in answered if a.key not in writer.done]
    needed = _bytes(waiting, bytes_per_token)
    _require_room(writer.folder, min(needed, budget_bytes - writer.bytes))
    async with EngineClient(handle) as client:
        while waiting:
            on_progress(len(answered) - len(waiting), len(answered))
            batch = waiting[: 2 * concurrency]
            while batch and _bytes(batch, bytes_per_token) > budget_bytes - writer.bytes:
                batch = batch[:-1]
            if not batch:
                break
            # Others write to this disk too. The engine's own files lie there beside the shard for a moment.
            _require_room(writer.folder, 2 * _bytes(batch, bytes_per_token))
            for captured in await _read(client, batch, concurrency):
                writer.add(captured)
            writer.close_shard()
            waiting = waiting[len(batch) :]
    if len(waiting) == len(answered):
        raise CaptureError(
            f"{budget_bytes / 2**30:.3f} GiB hold the states of no answer: raise drafter.capture_budget_gib"
        )
    on_progress(len(answered) - len(waiting), len(answered))
    return len(answered) - len(waiting)


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


async def _read(client: EngineClient, batch: Sequence[Answered], concurrency: int) -> list[Captured]:
    slots = asyncio.Semaphore(concurrency)

    async def one(answered: Answered) -> Generation:
        async with slots:
            return await client.capture(answered.token_ids, max_new_tokens=1, temperature=0.0, ignore_eos=True)

    generations = await asyncio.gather(*(one(a) for a in batch))
    await client.flush_captures()
    return [_take(a, g.hidden_states_path) for a, g in zip(batch, generations, strict=True)]


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
