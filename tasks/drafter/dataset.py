"""From captured sequences to training rows: alignment, loss mask, draft vocabulary, packing.

Row p of a sequence with tokens x[0..N] and states at 0..N-1 (definitions of EAGLE-3):

    hidden      g[p], the auxiliary states of token p
    input       x[p+1]
    target      y[p+1], the state from which the target predicts x[p+2]
    trained     when token p+1 was generated: the first proposal that is served comes from the row whose input is the
                answer's first token
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tasks.drafter.states import Captured


class DatasetError(ValueError):
    """Captured sequences that nothing can be learned from."""


@dataclass
class Rows:
    """Training rows of one sequence, or of several packed ones.

    hidden: [rows, aux_layers * hidden_size]; input_ids, next_ids (x[p+2]), position_ids, document_ids: [rows] int64;
    target: [rows, hidden_size], before the target's final norm; loss_mask: [rows] bool.
    """

    hidden: torch.Tensor
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    target: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor

    def __len__(self) -> int:
        return len(self.input_ids)


def rows(captured: Captured, max_rows: int, ttt_steps: int = 1) -> Rows:
    """Rows of one sequence, cut after `max_rows`.

    ttt_steps: in a pack, step j of a row near the end of a sequence is matched with row p+j, which belongs to the next
    sequence. Those must be untrained prompt rows there, so the prompt has to have at least `ttt_steps` tokens.
    Raises DatasetError when the prompt is shorter.
    """
    sequence = captured.sequence
    if sequence.num_prompt_tokens < ttt_steps:
        raise DatasetError(
            f"the prompt of {sequence.key} has {sequence.num_prompt_tokens} tokens, training-time test needs "
            f"{ttt_steps}"
        )
    token_ids = torch.tensor(sequence.token_ids)
    count = min(sequence.num_states - 1, max_rows)
    positions = torch.arange(count)
    return Rows(
        hidden=captured.states[:count, :-1].flatten(1),
        input_ids=token_ids[1 : count + 1],
        next_ids=token_ids[2 : count + 2],
        target=captured.states[1 : count + 1, -1],
        loss_mask=positions + 1 >= sequence.num_prompt_tokens,
        position_ids=positions,
        document_ids=torch.zeros(count, dtype=torch.long),
    )


def pack(sequences: Sequence[Rows]) -> Rows:
    """Several sequences as one; their rows are told apart by `document_ids`."""
    joined = {
        name: torch.cat([getattr(s, name) for s in sequences])
        for name in ("hidden", "input_ids", "next_ids", "target", "loss_mask", "position_ids")
    }
    lengths = torch.tensor([len(s) for s in sequences])
    return Rows(**joined, document_ids=torch.repeat_interleave(torch.arange(len(sequences)), lengths))


def batches(sequences: Sequence[Rows], micro_batch_tokens: int, seed: int) -> Iterator[Rows]:
    """Packs of at most `micro_batch_tokens` rows for ever; every sequence comes once an epoch, in an order of its own.

    Raises DatasetError when no row is trained on.
    """
    if not any(bool(s.loss_mask.any()) for s in sequences):
        raise DatasetError("no captured sequence has two generated tokens: nothing to learn; raise max_new_tokens")
    rng = random.Random(seed)
    pending: list[Rows] = []
    while True:
        order = list(range(len(sequences)))
        rng.shuffle(order)
        for index in order:
            if pending and sum(map(len, pending)) + len(sequences[index]) > micro_batch_tokens:
                yield pack(pending)
                pending = []
            pending.append(sequences[index])


def split(captured: Iterable[Captured], share: float, seed: int) -> tuple[list[Captured], list[Captured]]:
    """(training, held-out) sequences: `share` of each domain, at least one, is held out; chosen by `seed`.

    Raises DatasetError when a domain has a single sequence.
    """
    by_domain: dict[str, list[Captured]] = {}
    for c in captured:
        by_domain.setdefault(c.sequence.domain, []).append(c)
    train, held_out = [], []
    for domain, members in sorted(by_domain.items()):
        if len(members) < 2:
            raise DatasetError(f"domain {domain} has one captured sequence: two are needed, one of them to hold out")
        members = sorted(members, key=lambda c: c.sequence.key)
        random.Random(f"{seed}:{domain}").shuffle(members)
        count = max(1, round(share * len(members)))
        held_out += members[:count]
        train += members[count:]
    return train, held_out


@dataclass
class DraftVocab:
    """Which target tokens the head can propose.

    d2t: [draft_vocab_size] int64, target id of draft id i is i + d2t[i], increasing in i; t2d: [vocab_size] bool.
    coverage: share of the answers' tokens that are in it.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: float

    @property
    def target_ids(self) -> torch.Tensor:
        """Target ids of the draft ids [draft_vocab_size], increasing."""
        return self.d2t + torch.arange(len(self.d2t))


def draft_vocab(counts: Counter[int], vocab_size: int, draft_vocab_size: int) -> DraftVocab:
    """The most frequent tokens of the target's answers (ties: lower id), then the lowest ids, as a draft vocabulary.

    counts: of `answer_counts`.
    """
    size = min(draft_vocab_size, vocab_size)
    chosen = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    fill = (token for token in range(vocab_size) if token not in counts)
    chosen += [next(fill) for _ in range(size - len(chosen))]
    return vocab_of(torch.tensor(sorted(chosen)), vocab_size, counts)


def vocab_of(target_ids: torch.Tensor, vocab_size: int, counts: Counter[int]) -> DraftVocab:
    """The draft vocabulary of `target_ids` (increasing), with its coverage of answers counted as `counts`."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    kept = set(target_ids.tolist())
    covered = sum(n for token, n in counts.items() if token in kept)
    return DraftVocab(target_ids - torch.arange(len(target_ids)), t2d, covered / max(1, counts.total()))


def answer_counts(captured: Iterable[Captured]) -> Counter[int]:
    """How often each token was generated."""
    counts: Counter[int] = Counter()
    for c in captured:
        counts.update(c.sequence.token_ids[c.sequence.num_prompt_tokens :])
    return counts
