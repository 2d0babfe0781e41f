"""`python -m tasks.drafter.shard_process FOLDER LAYER_IDS`: shards out of an engine's files of hidden states.

Orders come as lines of JSON on stdin, an outcome for each goes to stdout. What is not done when stdin ends is not
wanted any more: whoever ordered it has died.
"""

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from infra.engine import captures
from infra.engine.errors import EngineError
from infra.store.tensor_files import header, read_header
from tasks.drafter.states import THREADS, Sequence, Shard, StatesError

_CHUNK = 2**20  # bytes that are read, checked, hashed and written while they are in a core's cache
_EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}
"""By dtype the integers that its values are looked at as, and the bits that are all set where one is not finite."""


class Entry(BaseModel):
    """A captured sequence. file: as `infra.engine.captures` describes it."""

    sequence: Sequence
    file: Path


class Order(BaseModel):
    number: int
    entries: list[Entry]


class Outcome(BaseModel):
    """error: why the shard, or some of its sequences, could not be written."""

    number: int
    error: str | None = None


class States:
    """The states of one sequence in the engine's file: `dtype`, `shape` [positions, layers, hidden]."""

    def __init__(self, entry: Entry, layers: int) -> None:
        """Raises StatesError when they are not those of the sequence's tokens at so many layers, EngineError when the
        engine has not written them."""
        sequence = entry.sequence
        captures.wait(entry.file)
        self.sequence, self._file = sequence, entry.file.open("rb")
        try:
            tensors = read_header(self._file)
        except ValueError as error:
            raise StatesError(f"{entry.file} is not whole: {error}") from error
        start = self._file.tell()
        token_ids, states = tensors["token_ids"], tensors["hidden_states"]
        self.dtype, (positions, *rest) = states["dtype"], states["shape"]
        self.shape = [sequence.num_states, *rest]
        self._file.seek(start + token_ids["data_offsets"][0])
        found = np.frombuffer(self._file.read(8 * len(sequence.token_ids)), np.int64).tolist()
        if token_ids["shape"] != [len(sequence.token_ids)] or found != sequence.token_ids:
            raise StatesError(
                f"the engine captured {token_ids['shape'][0]} tokens for {sequence.key}, which has "
                f"{len(sequence.token_ids)}, or others: {entry.file.name} belongs to another request or is cut short"
            )
        if positions < sequence.num_states or rest[0] != layers:
            raise StatesError(
                f"states of {sequence.key} have shape {states['shape']}: expected {sequence.num_states} positions "
                f"of {layers} layers"
            )
        self._file.seek(start + states["data_offsets"][0])
        begin, end = states["data_offsets"]
        self.bytes = (end - begin) // positions * sequence.num_states

    def chunks(self) -> Iterator[memoryview]:
        """Their bytes. Raises StatesError when a value is not finite, or the file ends too early."""
        kind, exponent = _EXPONENTS[self.dtype]
        memory, left = memoryview(bytearray(_CHUNK)), self.bytes
        while left:
            chunk = memory[: min(left, _CHUNK)]
            if self._file.readinto(chunk) != len(chunk):
                raise StatesError(f"{self._file.name} is cut short")
            if (np.frombuffer(chunk, kind) & exponent).max() == exponent:
                raise StatesError(f"states of {self.sequence.key} are not finite: the target overflows in this dtype")
            left -= len(chunk)
            yield chunk

    def close(self) -> None:
        self._file.close()


def commit(folder: Path, layer_ids: list[int], order: Order) -> None:
    """Write a shard of all sequences of `order` whose states are there, and remove the engine's files.

    Raises StatesError or EngineError, what was wrong with the first of those that are not in it, and OSError; when
    values are not finite, or the disk is full, nothing of the shard is kept.
    """
    found, wrong = [], []
    try:
        for entry in order.entries:
            try:
                found.append(States(entry, len(layer_ids)))
            except (StatesError, EngineError) as error:
                wrong.append(error)
        if found:
            _write(folder, layer_ids, f"shard-{order.number:05d}", found)
    finally:
        for states in found:
            states.close()
        for entry in order.entries:
            captures.discard(entry.file)
    if wrong:
        raise wrong[0]


def _write(folder: Path, layer_ids: list[int], name: str, found: list[States]) -> None:
    path, digest = folder / f"{name}.safetensors", hashlib.sha256()
    rows, size = sum(states.shape[0] for states in found), sum(states.bytes for states in found)
    head = header({"hidden_states": (found[0].dtype, [rows, *found[0].shape[1:]], size)})
    try:
        with path.open("wb") as file:
            digest.update(head)
            file.write(head)
            for states in found:
                for chunk in states.chunks():
                    digest.update(chunk)
                    file.write(chunk)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sequences, offset = [], 0
    for states in found:
        sequences.append(states.sequence.model_copy(update={"offset": offset}))
        offset += states.shape[0]
    shard = Shard(
        file=path.name,
        sha256=digest.hexdigest(),
        bytes=path.stat().st_size,
        layer_ids=layer_ids,
        sequences=sequences,
    )
    scratch = folder / f".{name}.json"
    scratch.write_text(shard.model_dump_json())
    os.replace(scratch, folder / f"{name}.json")


def main() -> None:
    folder, layer_ids = Path(sys.argv[1]), json.loads(sys.argv[2])

    def carry_out(order: Order) -> None:
        try:
            commit(folder, layer_ids, order)
            outcome = Outcome(number=order.number)
        except (StatesError, EngineError, OSError) as error:
            outcome = Outcome(number=order.number, error=str(error))
        except Exception as error:
            traceback.print_exc()
            outcome = Outcome(number=order.number, error=f"shard {order.number}: {type(error).__name__}: {error}")
        sys.stdout.write(outcome.model_dump_json() + "\n")  # one piece, so that lines of threads do not mix
        sys.stdout.flush()

    threads = ThreadPoolExecutor(THREADS)
    for line in sys.stdin.buffer:
        threads.submit(carry_out, Order.model_validate_json(line))
    os._exit(0)


if __name__ == "__main__":
    main()
