"""Capture: a capture engine reads the target's answers and writes the hidden states of every token.

Answers come from another engine: one that captures decodes at a third of the speed, and reads as fast as any.
"""

import asyncio
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.drafter.answers import Answered
from tasks.drafter.pace import Pace
from tasks.drafter.states import Sequence as CapturedSequence
from tasks.drafter.states_writer import StatesWriter

SPARE_BYTES = 2**28  # of the disk, for everything else that writes to it
WINDOW_BYTES = 2**32  # of states on their way: a GPU reads 300 MB a step, and each is five steps on its way


class CaptureError(RuntimeError):
    """States that could not be captured."""


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
    async with EngineClient(handle) as client:
        reader = _Reader(client, concurrency)
        window = _Window(writer)
        try:
            for one in _within(waiting, bytes_per_token, budget_bytes - writer.bytes):
                size = _bytes([one], bytes_per_token)
                while window.is_full(size):
                    on_progress(stored := stored + await window.move_on(), len(answered))
                _require_room(writer.folder, window.needed(size))
                window.put(reader.start(one), size)
            while window.tasks:
                on_progress(stored := stored + await window.move_on(), len(answered))
        finally:
            await window.keep()
    if not stored:
        raise CaptureError(
            f"{budget_bytes / 2**30:.3f} GiB hold the states of no answer: raise drafter.capture_budget_gib"
        )
    return stored


class _Reader:
    """Has the engine read sequences, at its pace."""

    def __init__(self, client: EngineClient, concurrency: int) -> None:
        self._client, self._pace = client, Pace(concurrency)
        self._unanswered = 0

    def start(self, answered: Answered) -> "asyncio.Task[tuple[CapturedSequence, Path]]":
        """The sequence and the file in which its states are, or soon will be."""
        self._unanswered += 1
        return asyncio.create_task(self._read(answered))

    async def _read(self, answered: Answered) -> tuple[CapturedSequence, Path]:
        try:
            async with self._pace.request(len(answered.token_ids)):
                generation = await self._client.capture(
                    answered.token_ids, max_new_tokens=1, temperature=0.0, ignore_eos=True
                )
        finally:
            self._unanswered -= 1
            if not self._unanswered:  # the engine writes a file when it reads on, and nothing is left to be read
                await self._client.flush_captures()
        return CapturedSequence.model_construct(**dict(answered)), generation.hidden_states_path


class _Window:
    """Sequences on their way to the writer, which gets them in their order, and the states that it has not written.

    tasks: what the engine was asked, with the bytes of its states.
    """

    def __init__(self, writer: StatesWriter) -> None:
        self._writer = writer
        self.tasks: deque[tuple[asyncio.Task[tuple[CapturedSequence, Path]], int]] = deque()
        self._bytes = 0  # of the tasks' states

    def put(self, task: "asyncio.Task[tuple[CapturedSequence, Path]]", size: int) -> None:
        self.tasks.append((task, size))
        self._bytes += size

    def needed(self, size: int) -> int:
        """Bytes of the disk for what is on its way and `size` more: the engine's files lie there beside the shards."""
        return 2 * (self._bytes + self._writer.unwritten + size)

    def is_full(self, size: int) -> bool:
        """Whether something must be written before `size` bytes more are asked for. Others write to this disk too."""
        on_its_way = self._bytes + self._writer.unwritten
        return on_its_way > 0 and (on_its_way + size > WINDOW_BYTES or _lacking(self._writer.folder, self.needed(size)))

    async def move_on(self) -> int:
        """Give the writer all that has arrived, or wait until something does or is written; how many it was given."""
        if self.tasks and not self.tasks[0][0].done() and self._writer.is_writing:
            await asyncio.to_thread(self._writer.wait)
        elif self.tasks:
            await asyncio.wait([self.tasks[0][0]])
        else:
            await asyncio.to_thread(self._writer.close_shard)
        self._writer.check()
        given = 0
        while self.tasks and self.tasks[0][0].done():
            task, size = self.tasks.popleft()
            self._bytes -= size
            self._writer.add(*task.result(), size)
            given += 1
        return given

    async def keep(self) -> None:
        """Give the writer all that arrive of those left, whatever happened to the others."""
        results = await asyncio.gather(*(task for task, _ in self.tasks), return_exceptions=True)
        for result, (_, size) in zip(results, self.tasks, strict=True):
            if not isinstance(result, BaseException):
                self._writer.add(*result, size)


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
