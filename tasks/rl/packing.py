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
    """input_T, position_T: int64, tokens and their positions. block_T: int32, group of a token within the row.
    branch_T: int32, 0 for a prompt, else the number of the answer within its group.

    Per sampled token, [N]: row_N, the input position that predicts it; target_N, the token; logprob_N, the engine's
    log-prob, float64; advantage_N, float64; sequence_N, answer within the micro-batch.
    answers: for each of the micro-batch's answers its (group, answer) in the batch.
    """

    input_T: np.ndarray
    position_T: np.ndarray
    block_T: np.ndarray
    branch_T: np.ndarray
    row_N: np.ndarray
    target_N: np.ndarray
    logprob_N: np.ndarray
    advantage_N: np.ndarray
    sequence_N: np.ndarray
    answers: list[tuple[int, int]]

    def mask(self) -> np.ndarray:
        """bool [T, T]: which tokens (columns) a token (row) attends to."""
        order_T = np.arange(len(self.input_T))
        same_group = self.block_T[:, None] == self.block_T[None, :]
        visible = (self.branch_T[None, :] == 0) | (self.branch_T[:, None] == self.branch_T[None, :])
        return (order_T[:, None] >= order_T[None, :]) & same_group & visible


@dataclass(frozen=True)
class _Piece:
    """A group, or as many answers of it as fit into a micro-batch together."""

    group: int
    answers: list[int]
    num_tokens: int


def pack(groups: Sequence[TrainingGroup], max_tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens that hold every answer once; first-fit decreasing.

    A prompt is repeated only where its answers do not fit together; a single answer that is longer than `max_tokens`
    with its prompt gets a micro-batch of its own. Empty answers are left out.
    """
    pieces = [piece for number, group in enumerate(groups) for piece in _pieces(number, group, max_tokens)]
    bins: list[list[_Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda p: (-p.num_tokens, p.group, p.answers)):
        place = next((i for i, free in enumerate(room) if piece.num_tokens <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(piece)
        room[place] -= piece.num_tokens
    return [_micro_batch(groups, chosen) for chosen in bins]


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
    tokens: dict[str, list[np.ndarray]] = {name: [] for name in ("input", "position", "block", "branch")}
    samples: dict[str, list[np.ndarray]] = {name: [] for name in ("row", "target", "logprob", "advantage", "sequence")}
    answers: list[tuple[int, int]] = []
    filled = 0
    for block, piece in enumerate(pieces):
        group, start = groups[piece.group], filled
        prompt = len(group.prompt_ids)
        filled = _append(tokens, filled, group.prompt_ids, 0, block, 0)
        for branch, number in enumerate(piece.answers, start=1):
            answer = group.answers[number]
            inputs = answer[:-1]
            # the prompt's last token predicts the first token of every answer
            rows = np.concatenate([[start + prompt - 1], np.arange(filled, filled + len(inputs))])
            filled = _append(tokens, filled, inputs, prompt, block, branch)
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
    return MicroBatch(**flat, answers=answers)


def _append(
    tokens: dict[str, list[np.ndarray]], filled: int, ids: np.ndarray, first: int, block: int, branch: int
) -> int:
    tokens["input"].append(ids)
    tokens["position"].append(np.arange(first, first + len(ids)))
    tokens["block"].append(np.full(len(ids), block))
    tokens["branch"].append(np.full(len(ids), branch))
    return filled + len(ids)
