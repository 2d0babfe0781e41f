"""Capture: a capture engine reads the target's answers and writes the hidden states of every token.

Answers come from another engine: one that captures decodes at a third of the speed, and reads as fast as any.
"""

import asyncio
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

from pydantic import BaseModel

from infra.engine import captures
from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.drafter.answers import Answered
from tasks.drafter.pace import Pace
from tasks.drafter.states import Captured, StatesWriter
from tasks.drafter.states import Sequence as CapturedSequence

SPARE_BYTES = 2**28  # of the disk, for everything else that writes to it
WINDOW_BYTES = 2**32  # of states on their way: a GPU reads 300 MB a step, and each is five steps on its way
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
    concurrency: requests in flight at most (`Pace`). on_progress: called with (sequences done, of all).
    Raises CaptureError when the disk has less room than the states need, at the start or later on, or the budget holds
    none; what was captured stays.
    """
    waiting = [a for a in answered if a.key not in writer.done]
    stored = len(answered) - len(waiting)
    _require_room(writer.folder, min(_bytes(waiting, bytes_per_token), budget_bytes - writer.bytes))
    on_progress(stored, len(answered))
    with ThreadPoolExecutor(TAKERS) as takers:
        async with EngineClient(handle) as client:
            reader = _Reader(client, takers, concurrency)
            window = _Window(writer)
            try:
                for one in _within(waiting, bytes_per_token, budget_bytes - writer.bytes):
                    size = _bytes([one], bytes_per_token)
                    # Others write to this disk too. The engine's own files lie there beside the shards for a moment.
                    while window.tasks and (
                        window.bytes + size > WINDOW_BYTES or _lacking(writer.folder, 2 * (window.bytes + size))
                    ):
                        on_progress(stored := stored + await window.store(), len(answered))
                    _require_room(writer.folder, 2 * (window.bytes + size))
                    window.put(reader.start(one), size)
                while window.tasks:
                    on_progress(stored := stored + await window.store(), len(answered))
            finally:
                await window.keep()
    if not stored:
        raise CaptureError(
            f"{budget_bytes / 2**30:.3f} GiB hold the states of no answer: raise drafter.capture_budget_gib"
        )
    return stored


class _Reader:
    """Has the engine read sequences, at its pace, and takes their states from its files."""

    def __init__(self, client: EngineClient, takers: ThreadPoolExecutor, concurrency: int) -> None:
        self._client, self._takers, self._pace = client, takers, Pace(concurrency)
        self._unanswered = 0

    def start(self, answered: Answered) -> "asyncio.Task[Captured]":
        self._unanswered += 1
        return asyncio.create_task(self._read(answered))

    async def _read(self, answered: Answered) -> Captured:
        try:
            async with self._pace.request(len(answered.token_ids)):
                generation = await self._client.capture(
                    answered.token_ids, max_new_tokens=1, temperature=0.0, ignore_eos=True
                )
        finally:
            self._unanswered -= 1
            if not self._unanswered:  # the engine writes a file when it reads on, and nothing is left to be read
                await self._client.flush_captures()
        path = generation.hidden_states_path
        return await asyncio.get_running_loop().run_in_executor(self._takers, _take, answered, path)


class _Window:
    """Sequences on their way, in the order in which they are stored. bytes: of their states."""

    def __init__(self, writer: StatesWriter) -> None:
        self._writer = writer
        self.tasks: deque[tuple[asyncio.Task[Captured], int]] = deque()
        self.bytes = 0

    def put(self, task: "asyncio.Task[Captured]", size: int) -> None:
        self.tasks.append((task, size))
        self.bytes += size

    async def store(self) -> int:
        """Wait for the oldest and store it with all behind it that are there too; how many these are."""
        await asyncio.wait([self.tasks[0][0]])
        ready = [task for task, _ in takewhile(lambda entry: entry[0].done(), self.tasks)]
        arrived = [task.result() for task in takewhile(lambda task: not task.exception(), ready)]
        if not arrived:
            self.tasks.popleft()[0].result()  # raises what went wrong
        for _ in arrived:
            self.bytes -= self.tasks.popleft()[1]
        await asyncio.to_thread(_store, self._writer, arrived)
        return len(arrived)

    async def keep(self) -> None:
        """Store all that arrive of those left, whatever happened to the others."""
        results = await asyncio.gather(*(task for task, _ in self.tasks), return_exceptions=True)
        await asyncio.to_thread(_store, self._writer, [r for r in results if not isinstance(r, BaseException)])


def _within(waiting: Sequence[Answered], bytes_per_token: int, budget_bytes: int) -> Iterator[Answered]:
    """Those that the budget holds, in their order."""
    for answered in waiting:
        budget_bytes -= _bytes([answered], bytes_per_token)
        if budget_bytes < 0:
            return
        yield answered


def _lacking(folder: Path, needed: int) -> bool:
    """Whether the disk has less room than that."""
    return needed > shutil.disk_usage(folder).free - SPARE_BYTES


def _require_room(folder: Path, needed: int) -> None:
    if _lacking(folder, needed):
        free = shutil.disk_usage(folder).free
        raise CaptureError(
            f"hidden states need {needed / 2**30:.2f} GiB more, {folder} has {free / 2**30:.2f} GiB free, of which "
            f"{SPARE_BYTES / 2**30:.2f} are left alone: free some, lower drafter.capture_budget_gib, or set "
            f"drafter.stream=true"
        )


def _bytes(answered: Sequence[Answered], bytes_per_token: int) -> int:
    return bytes_per_token * sum(len(a.token_ids) for a in answered)


def _store(writer: StatesWriter, arrived: Sequence[Captured]) -> None:
    for captured in arrived:
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
