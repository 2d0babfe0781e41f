"""From captured sequences to training rows: alignment, loss mask, draft vocabulary, packing.

Row p of a sequence with tokens x[0..N] and states at 0..N-1 (definitions of EAGLE-3):

    hidden      g[p], the auxiliary states of token p
    input       x[p+1]
    target      y[p+1], the state from which the target predicts x[p+2]
    trained     when tokens p+1 and p+2 were generated in one answer: the first proposal that is served comes from the
                row whose input is the answer's first token, and behind its last one nothing is proposed
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from infra.config.drafter import DrafterConfig
from tasks.drafter.states import Captured, Sequence

if TYPE_CHECKING:
    from tasks.drafter.ttt import Plan


class DatasetError(ValueError):
    """Captured sequences that nothing can be learned from."""


@dataclass
class Rows:
    """Training rows of one sequence, or of several packed ones.

    hidden: [rows, aux_layers * hidden_size]; input_ids, next_ids (x[p+2]), position_ids, document_ids: [rows] int64;
    target: [rows, hidden_size], before the target's final norm; loss_mask: [rows] bool. plan: `ttt.Plan`, where what
    the loss computes has been looked up before.
    """

    hidden: torch.Tensor
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    target: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    plan: "Plan | None" = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def trained(self) -> int:
        """Rows that the loss reads."""
        return len(self.plan.trained) if self.plan else int(self.loss_mask.sum())

    def idle(self) -> "Rows":
        """The same rows, of which the loss reads none."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask), plan=None)

    def to(self, device: str) -> "Rows":
        """The same rows on `device`, without waiting for them where they are pinned; states in float32, whatever the
        engine computed in: moving is cheaper before."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in TENSORS}
        states = {name: moved[name].float() for name in ("hidden", "target")}
        return Rows(**moved | states, plan=self.plan and self.plan.to(device))


TENSORS = tuple(each.name for each in fields(Rows) if each.name != "plan")


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
        hidden=captured.states.flatten(1)[:count, : -captured.states.shape[2]],  # as a view
        input_ids=token_ids[1 : count + 1],
        next_ids=token_ids[2 : count + 2],
        target=captured.states[1 : count + 1, -1],
        loss_mask=loss_mask(sequence)[:count],
        position_ids=positions,
        document_ids=torch.zeros(count, dtype=torch.long),
    )


def loss_mask(sequence: Sequence) -> torch.Tensor:
    """Which rows of a sequence are trained on, [num_states - 1] bool."""
    mask = torch.zeros(sequence.num_states - 1, dtype=torch.bool)
    for start, end in sequence.answers:
        mask[start - 1 : end - 2] = True
    return mask


def pack(sequences: List[Rows], pinned: bool = False) -> Rows:
    """Several sequences as one; their rows are told apart by `document_ids`. pinned: in memory that a GPU reads by
    itself."""
    names = (name for name in TENSORS if name != "document_ids")
    joined = {name: _joined([getattr(s, name) for s in sequences], pinned) for name in names}
    lengths = torch.tensor([len(s) for s in sequences])
    numbers = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    return Rows(**joined, document_ids=numbers.pin_memory() if pinned else numbers)


def _joined(parts: list[torch.Tensor], pinned: bool) -> torch.Tensor:
    if not pinned:
        return torch.cat(parts)
    whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(parts, out=whole)


def schedule(
    lengths: List[int], micro_batch_tokens: int, seed: int, weights: List[float] | None = None
) -> Iterator[list[int]]:
    """Which sequences go into each pack of at most `micro_batch_tokens` rows, for ever; every sequence comes once an
    epoch, in an order of its own.

    lengths: rows of each. weights: how often each comes in an epoch instead; a fraction is a chance.
    """
    rng = random.Random(seed)
    pending: list[int] = []
    while True:
        order = [
            index
            for index, weight in enumerate(weights or [1.0] * len(lengths))
            for _ in range(int(weight) + (rng.random() < weight % 1))
        ]
        rng.shuffle(order)
        for index in order:
            if pending and sum(lengths[i] for i in pending) + lengths[index] > micro_batch_tokens:
                yield pending
                pending = []
            pending.append(index)


def packs(sequences: List[Sequence], config: DrafterConfig) -> Iterator[list[int]]:
    """`schedule` of `sequences` as the configuration asks for it."""
    lengths = [min(s.num_states - 1, config.micro_batch_tokens) for s in sequences]
    weight_of = {source.domain: source.weight for source in config.traffic}
    weights = [weight_of.get(s.domain, 1.0) for s in sequences]
    return schedule(lengths, config.micro_batch_tokens, config.seed, weights)


def require_learnable(sequences: Iterable[Sequence], max_rows: int) -> None:
    """Raises DatasetError when no row of the first `max_rows` of any sequence is trained on."""
    if not any(bool(loss_mask(s)[:max_rows].any()) for s in sequences):
        raise DatasetError("no captured sequence has two generated tokens: nothing to learn; raise max_new_tokens")


def split(captured: Iterable[Captured], share: float, seed: int) -> tuple[list[Captured], list[Captured]]:
    """(training, held-out) sequences, as `split_by_domain`."""
    by_key = {c.sequence.key: c for c in captured}
    parts = split_by_domain([c.sequence for c in by_key.values()], share, seed)
    train, held_out = ([by_key[s.key] for s in part] for part in parts)
    return train, held_out


def split_by_domain(sequences: Iterable[Any], share: float, seed: int) -> tuple[list, list]:
    """(training, held-out): `share` of each domain, at least one, is held out; chosen by `seed`.

    sequences: with `key` and `domain`.
    Raises DatasetError when a domain has a single sequence.
    """
    by_domain: dict[str, list[Any]] = {}
    for sequence in sequences:
        by_domain.setdefault(sequence.domain, []).append(sequence)
    train, held_out = [], []
    for domain, members in sorted(by_domain.items()):
        if len(members) < 2:
            raise DatasetError(f"domain {domain} has one captured sequence: two are needed, one of them to hold out")
        members = sorted(members, key=lambda s: s.key)
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


def answer_counts(sequences: Iterable[Sequence]) -> Counter[int]:
    """How often each token was generated."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(sequence.generated)
    return counts
