"""Captured sequences on disk: tokens, and the target's hidden states at each of them, in checksummed shards.

A shard is `shard-00000.safetensors` (tensor `hidden_states` [positions, layers, hidden]) and `shard-00000.json`, which
lists its sequences and the sha256 of the former. The JSON is written last: a shard exists if and only if its JSON does,
and whatever an interruption leaves without one is removed by the next writer.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    import torch


THREADS = 8
"""Shards written, or read, at once: an engine on a GPU captures faster than one thread can hash."""
WAITING = 2 * THREADS
"""Shards that are being written or wait for it, at most: then what captures waits."""


class StatesError(RuntimeError):
    """Captured states that are not what was asked for."""


class Sequence(BaseModel):
    """One prompt with the target's answer, or a conversation with all its answers.

    key: names the prompt and how it was answered; unique.
    token_ids: prompt and answers [tokens].
    answers: (start, end) of each answer: token_ids[start:end] is what the target generated.
    finish_reason: of the last answer, `stop` or `length`.
    offset: first of its `len(token_ids) - 1` positions in the shard (the last token was sampled, never an input).
    """

    key: str
    domain: str
    token_ids: list[int]
    answers: list[tuple[int, int]]
    finish_reason: str
    offset: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first answer."""
        return self.answers[0][0]

    @property
    def generated(self) -> list[int]:
        """All tokens that the target generated."""
        return [token for start, end in self.answers for token in self.token_ids[start:end]]

    @property
    def num_states(self) -> int:
        return len(self.token_ids) - 1


class Shard(BaseModel):
    """What the JSON of a shard holds.

    layer_ids: what was captured, in the order of dimension 1: id k is the residual stream after k layers; the last id
    is the number of layers, the state that the target's final norm takes.
    """

    file: str
    sha256: str
    bytes: int
    layer_ids: list[int]
    sequences: list[Sequence]


@dataclass
class Captured:
    """A sequence with its states: `states` [len(token_ids) - 1, layers, hidden]."""

    sequence: Sequence
    states: "torch.Tensor"


class StatesWriter:
    """Appends sequences to `folder`, in shards. As a context manager it closes the last shard at the end.

    folder: may hold shards of an interrupted run; `done` has the keys of their sequences.
    Raises StatesError when those shards hold other layers.
    """

    def __init__(self, folder: Path, layer_ids: list[int], shard_bytes: int = 64 * 2**20):
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
        self._open: list[Captured] = []
        self._open_bytes = 0
        self._threads = ThreadPoolExecutor(THREADS)
        self._writing: list[Future] = []

    def add(self, captured: Captured) -> None:
        """Keep one sequence; it is on disk once its shard is full and written, or closed.

        Raises StatesError when its states do not fit its tokens, and what went wrong in writing earlier ones. That its
        states are not finite is found when its shard is written, and nothing of that shard is kept.
        """
        sequence, states = captured.sequence, captured.states
        if states.shape[:2] != (sequence.num_states, len(self.layer_ids)):
            raise StatesError(
                f"states of {sequence.key} have shape {list(states.shape)}: expected {sequence.num_states} positions "
                f"of {len(self.layer_ids)} layers"
            )
        self._open.append(captured)
        self.done.add(sequence.key)
        size = states.numel() * states.element_size()
        self._open_bytes += size
        self.bytes += size
        if self._open_bytes >= self.shard_bytes:
            self._commit_open()

    def close_shard(self) -> None:
        """Commit what was added, and wait until it is. Raises what went wrong in writing any of it."""
        self._commit_open()
        writing, self._writing = self._writing, []
        for shard in writing:
            shard.result()

    def _commit_open(self) -> None:
        while len(self._writing) >= WAITING:  # they hold their states in memory
            self._writing.pop(0).result()
        if self._open:
            self._writing.append(self._threads.submit(self._commit, self._number, self._open))
            self._number += 1
            self._open, self._open_bytes = [], 0

    def _commit(self, number: int, added: list[Captured]) -> None:
        name = f"shard-{number:05d}"
        path = self.folder / f"{name}.safetensors"
        for captured in added:
            _require_finite(captured)
        sha256 = _write(path, [c.states for c in added])
        sequences, offset = [], 0
        for captured in added:
            sequences.append(captured.sequence.model_copy(update={"offset": offset}))
            offset += captured.sequence.num_states
        shard = Shard(
            file=path.name,
            sha256=sha256,
            bytes=path.stat().st_size,
            layer_ids=self.layer_ids,
            sequences=sequences,
        )
        scratch = self.folder / f".{name}.json"
        scratch.write_text(shard.model_dump_json())
        os.replace(scratch, self.folder / f"{name}.json")

    def __enter__(self) -> "StatesWriter":
        return self

    def __exit__(self, *exc) -> None:
        with self._threads:
            self.close_shard()


def read_index(folder: Path) -> list[Shard]:
    """The shards of `folder`, in order of writing."""
    return [Shard.model_validate(json.loads(path.read_text())) for path in sorted(folder.glob("shard-*.json"))]


def read_states(folder: Path) -> Iterator[Captured]:
    """Every sequence of `folder` with its states in the engine's dtype, in order of writing.

    Raises StatesError when a shard is not the one that was written, or there is none.
    """
    shards = read_index(folder)
    if not shards:
        raise StatesError(f"{folder} holds no captured states: capture some first")
    with ThreadPoolExecutor(THREADS) as threads:
        for shard, states in zip(shards, threads.map(partial(_load, folder), shards), strict=True):
            for sequence in shard.sequences:
                yield Captured(sequence, states[sequence.offset : sequence.offset + sequence.num_states])


def _require_finite(captured: Captured) -> None:
    least, most = captured.states.aminmax()  # one pass, which NaN gets through; a sum in float64 takes 30 times as long
    if not bool(least.isfinite() & most.isfinite()):
        raise StatesError(f"states of {captured.sequence.key} are not finite: the target overflows in this dtype")


def _write(path: Path, states: "list[torch.Tensor]") -> str:
    """Write `states` behind each other as one tensor, in the format of safetensors; the file's sha256.

    Each is read once, without being put together in memory first: they are mapped files of the engine, and an engine on
    a GPU writes two gigabytes a second.
    """
    import torch

    from infra.transport.shards import header

    pieces = [one.contiguous().flatten().view(torch.uint8).numpy() for one in states]
    rows, size = sum(len(one) for one in states), sum(piece.nbytes for piece in pieces)
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[states[0].dtype]
    head = header({"hidden_states": (dtype, [rows, *states[0].shape[1:]], size)})
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (head, *pieces):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _load(folder: Path, shard: Shard) -> "torch.Tensor":
    from safetensors.torch import load_file

    path = folder / shard.file
    if _sha256(path) != shard.sha256:
        raise StatesError(f"{path} is not the file that was captured (its sha256 differs): capture again")
    return load_file(path)["hidden_states"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
