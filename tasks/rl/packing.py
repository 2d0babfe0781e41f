"""Groups packed into micro-batches without padding, every prompt only once.

A micro-batch is one row. A group lies in it as its prompt followed by its answers, each of which sees the prompt and
itself; positions continue from the prompt. The last token of an answer predicts no sampled token and is left out.
The result is that of one row per answer, for a fraction of the tokens when prompts are long against answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.rl.batch import TrainingGroup


@dataclass(frozen=True)
class MicroBatch:
    """input_T, position_T: int64, tokens and their positions.
    layout: for each group of the row the tokens of its prompt and of each of its answers.

    Per sampled token, [N]: row_N, the input position that predicts it; target_N, the token; logprob_N, the engine's
    log-prob, float64; advantage_N, float64; sequence_N, answer within the micro-batch.
    answers: for each of the micro-batch's answers its (group, answer) in the batch.
    """

    input_T: np.ndarray
    position_T: np.ndarray
    layout: list[tuple[int, list[int]]]
    row_N: np.ndarray
    target_N: np.ndarray
    logprob_N: np.ndarray
    advantage_N: np.ndarray
    sequence_N: np.ndarray
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class _Piece:
    """A group, or as many answers of it as fit into a micro-batch together."""

    group: int
    answers: list[int]
    num_tokens: int


_NOTHING = MicroBatch(
    input_T=np.zeros(1, np.int64),
    position_T=np.zeros(1, np.int64),
    layout=[(1, [])],
    row_N=np.zeros(0, np.int64),
    target_N=np.zeros(0, np.int64),
    logprob_N=np.zeros(0),
    advantage_N=np.zeros(0),
    sequence_N=np.zeros(0, np.int64),
    answers=[],
)
"""For a rank that has nothing to compute while the others do: they exchange weights and gradients with it."""


def pack(groups: Sequence[TrainingGroup], max_tokens: int, ranks: int = 1) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens that hold every answer once.

    A prompt is repeated only where its answers do not fit together; a single answer that is longer than `max_tokens`
    with its prompt gets a micro-batch of its own. Empty answers are left out.
    ranks: the number of micro-batches is a multiple of it, `share` gives each rank its own; they are of equal size as
    far as answers allow, and hold nothing where there are too few.
    """
    if ranks > 1:
        whole = sum(piece.num_tokens for n, group in enumerate(groups) for piece in _pieces(n, group, max_tokens))
        max_tokens = min(max_tokens, max(1, -(-whole // ranks)))
    pieces = [piece for number, group in enumerate(groups) for piece in _pieces(number, group, max_tokens)]
    pieces.sort(key=lambda p: (-p.num_tokens, p.group, p.answers))
    bins = _first_fit(pieces, max_tokens)
    if ranks > 1:
        bins += [[] for _ in range(-len(bins) % ranks)]
        bins = _even(pieces, len(bins), max_tokens) or bins
    return [_micro_batch(groups, chosen) if chosen else _NOTHING for chosen in bins]


def share(micro_batches: Sequence[MicroBatch], rank: int, ranks: int) -> list[MicroBatch]:
    """The micro-batches that `rank` of `ranks` computes: as many as every other rank."""
    return list(micro_batches[rank::ranks])


def _first_fit(pieces: Sequence[_Piece], max_tokens: int) -> list[list[_Piece]]:
    bins: list[list[_Piece]] = []
    room: list[int] = []
    for piece in pieces:
        place = next((i for i, free in enumerate(room) if piece.num_tokens <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(piece)
        room[place] -= piece.num_tokens
    return bins


def _even(pieces: Sequence[_Piece], num_bins: int, max_tokens: int) -> list[list[_Piece]] | None:
    """Each piece, largest first, into the emptiest bin; None where that overflows one."""
    bins: list[list[_Piece]] = [[] for _ in range(num_bins)]
    filled = [0] * num_bins
    for piece in pieces:
        place = filled.index(min(filled))
        if bins[place] and filled[place] + piece.num_tokens > max_tokens:
            return None
        bins[place].append(piece)
        filled[place] += piece.num_tokens
    return bins


def _pieces(number: int, group: TrainingGroup, max_tokens: int) -> list[_Piece]:
    pieces, chosen, tokens = [], [], len(group.prompt_ids)
    for answer in range(len(group.answers)):
        more = len(group.answers[answer]) - 1
        if more < 0:
            continue
        if chosen and tokens + more > max_tokens:
            pieces.append(_Piece(number, chosen, tokens))
            chosen, tokens = [], len(group.prompt_ids)
        chosen.append(answer)
        tokens += more
    return [*pieces, _Piece(number, chosen, tokens)] if chosen else pieces


def _micro_batch(groups: Sequence[TrainingGroup], pieces: Sequence[_Piece]) -> MicroBatch:
    tokens: dict[str, list[np.ndarray]] = {name: [] for name in ("input", "position")}
    samples: dict[str, list[np.ndarray]] = {name: [] for name in ("row", "target", "logprob", "advantage", "sequence")}
    answers: list[tuple[int, int]] = []
    layout: list[tuple[int, list[int]]] = []
    filled = 0
    for piece in pieces:
        group, start = groups[piece.group], filled
        prompt = len(group.prompt_ids)
        layout.append((prompt, [len(group.answers[number]) - 1 for number in piece.answers]))
        filled = _append(tokens, filled, group.prompt_ids, 0)
        for number in piece.answers:
            answer = group.answers[number]
            inputs = answer[:-1]
            # the prompt's last token predicts the first token of every answer
            rows = np.concatenate([[start + prompt - 1], np.arange(filled, filled + len(inputs))])
            filled = _append(tokens, filled, inputs, prompt)
            own = np.ones(len(answer), bool) if group.own is None else group.own[number]
            samples["row"].append(rows[own])
            samples["target"].append(answer[own])
            samples["logprob"].append(group.logprobs[number][own])
            samples["advantage"].append(np.full(own.sum(), group.advantages[number]))
            samples["sequence"].append(np.full(own.sum(), len(answers)))
            answers.append((piece.group, number))
    flat = {f"{name}_T": np.concatenate(parts).astype(np.int64) for name, parts in tokens.items()}
    kinds = {"logprob": np.float64, "advantage": np.float64}
    flat |= {f"{name}_N": np.concatenate(parts).astype(kinds.get(name, np.int64)) for name, parts in samples.items()}
    return MicroBatch(**flat, layout=layout, answers=answers)


def _append(tokens: dict[str, list[np.ndarray]], filled: int, ids: np.ndarray, first: int) -> int:
    tokens["input"].append(ids)
    tokens["position"].append(np.arange(first, first + len(ids)))
    return filled + len(ids)
