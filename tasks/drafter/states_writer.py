"""Writes captured sequences to disk: shards as `tasks.drafter.states` reads them, out of the engine's files."""

import contextlib
import json
import subprocess
import sys
import threading
from concurrent.futures import Future, wait
from pathlib import Path

from tasks.drafter.shard_process import Entry, Order, Outcome
from tasks.drafter.states import Sequence, StatesError, read_index


class StatesWriter:
    """Appends sequences to `folder`, in shards. A context manager, which closes the last shard at the end.

    Shards are written by another process, `tasks.drafter.shard_process`: threads of this one that read, hash and write
    gigabytes would halve the rate at which it sends the engine requests.
    folder: may hold shards of an interrupted run; `done` has the keys of their sequences.
    Raises StatesError when those shards hold other layers.
    """

    def __init__(self, folder: Path, layer_ids: list[int], shard_bytes: int = 64 * 2**20) -> None:
        self.folder, self.layer_ids, self.shard_bytes = folder, list(layer_ids), shard_bytes
        folder.mkdir(parents=True, exist_ok=True)
        shards = read_index(folder)
        for shard in shards:
            if shard.layer_ids != self.layer_ids:
                raise StatesError(
                    f"{folder} holds states of layers {shard.layer_ids}, not {layer_ids}: empty the folder"
                )
        whole = {shard.file for shard in shards}
        for left in [*folder.glob("shard-*.safetensors"), *folder.glob(".shard-*.json")]:
            if left.name not in whole:
                left.unlink()
        self.done = {s.key for shard in shards for s in shard.sequences}
        self.bytes = sum(shard.bytes for shard in shards)
        self._number = max((int(shard.file[len("shard-") :].split(".")[0]) for shard in shards), default=-1) + 1
        self._open: list[Entry] = []
        self._open_bytes = 0
        self._writing: list[tuple[Future[None], int]] = []

    def add(self, sequence: Sequence, file: Path, size: int) -> None:
        """Keep one sequence; it is on disk once its shard is full and written, or closed.

        file: the engine's, with its states; it may still be written, and is removed when it has been read. size: bytes
        of these states.
        """
        self._open.append(Entry(sequence=sequence, file=file))
        self._open_bytes += size
        self.bytes += size
        self.done.add(sequence.key)
        if self._open_bytes >= self.shard_bytes:
            self._commit_open()

    def check(self) -> None:
        """Raises StatesError, why a shard or a sequence in it could not be written: states that do not fit their tokens
        or are not finite, or a full disk."""
        while self._writing and self._writing[0][0].done():
            self.wait()

    @property
    def is_writing(self) -> bool:
        """Whether shards are being written or wait for it."""
        return bool(self._writing)

    @property
    def unwritten(self) -> int:
        """Bytes of states that were added and may not be in a shard yet."""
        return self._open_bytes + sum(size for shard, size in self._writing if not shard.done())

    def wait(self) -> None:
        """Until the oldest of the shards that are being written is on disk. Raises what `check` does."""
        shard, _ = self._writing.pop(0)
        shard.result()

    def close_shard(self) -> None:
        """Commit what was added, and wait until it is. Raises what `check` does."""
        self._commit_open()
        shards, self._writing = [shard for shard, _ in self._writing], []
        wait(shards)  # all of them: whatever is wrong with one, the others are kept
        for shard in shards:
            shard.result()

    def _commit_open(self) -> None:
        if self._open:
            shard = self._process.write(Order(number=self._number, entries=self._open))
            self._writing.append((shard, self._open_bytes))
            self._number += 1
            self._open, self._open_bytes = [], 0

    def __enter__(self) -> "StatesWriter":
        self._process = _ShardProcess(self.folder, self.layer_ids)
        return self

    def __exit__(self, *exc) -> None:
        try:
            self.close_shard()
        finally:
            self._process.end()


class _ShardProcess:
    """`tasks.drafter.shard_process` at work: orders go in as lines, outcomes come back as lines in any order."""

    def __init__(self, folder: Path, layer_ids: list[int]) -> None:
        self._ordered: dict[int, Future[None]] = {}
        self._lock, self._ended = threading.Lock(), False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.drafter.shard_process", str(folder.absolute()), json.dumps(layer_ids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the keyboard is for this process, which closes its shards
        )
        self._listening = threading.Thread(target=self._listen, name="lockstep-shards", daemon=True)
        self._listening.start()

    def write(self, order: Order) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(_lost(order.number))
                return future
            self._ordered[order.number] = future
        with contextlib.suppress(BrokenPipeError):  # it has died, which whoever listens tells everybody who waits
            self._process.stdin.write(order.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()
        return future

    def end(self) -> None:
        """Also in the midst of writing."""
        with contextlib.suppress(BrokenPipeError):  # it has died: what it was not told any more is of no use
            self._process.stdin.close()
        self._process.wait()
        self._listening.join()
        self._process.stdout.close()

    def _listen(self) -> None:
        for line in self._process.stdout:
            outcome = Outcome.model_validate_json(line)
            with self._lock:
                future = self._ordered.pop(outcome.number)
            if outcome.error:
                future.set_exception(StatesError(outcome.error))
            else:
                future.set_result(None)
        with self._lock:
            self._ended = True
            for number, future in self._ordered.items():
                future.set_exception(_lost(number))


def _lost(number: int) -> StatesError:
    return StatesError(f"shard {number} is lost: the process that writes shards has died")
