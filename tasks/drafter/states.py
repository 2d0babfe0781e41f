"""Captured sequences on disk: tokens, and the target's hidden states at each of them, in checksummed shards.

A shard is `shard-00000.safetensors` (tensor `hidden_states` [positions, layers, hidden]) and `shard-00000.json`, which
lists its sequences and the sha256 of the former. The JSON is written last: a shard exists if and only if its JSON does,
and whatever an interruption leaves without one is removed by the next writer (`tasks.drafter.states_writer`).
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    import torch


THREADS = 8
"""Shards written, or read, at once: an engine on a GPU captures faster than one thread can hash."""


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


def _load(folder: Path, shard: Shard) -> "torch.Tensor":
    from safetensors.torch import load_file

    path = folder / shard.file
    if _sha256(path) != shard.sha256:
        raise StatesError(f"{path} is not the file that was captured (its sha256 differs): capture again")
    return load_file(path)["hidden_states"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
