"""From captured sequences to training rows."""

from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.drafter import dataset
from tasks.drafter.states import Captured, Sequence


def captured(key="a", prompt=4, answer=5, domain="d", hidden=2, tokens=None) -> Captured:
    token_ids = tokens or list(range(100, 100 + prompt + answer))
    states = torch.arange(len(token_ids) - 1, dtype=torch.float32)[:, None, None] + torch.arange(4)[:, None] / 10
    sequence = Sequence(
        key=key, domain=domain, token_ids=token_ids, answers=[(prompt, len(token_ids))], finish_reason="length"
    )
    return Captured(sequence, states.expand(-1, -1, hidden).contiguous())


def test_rows_are_aligned_as_eagle_defines_them():
    # x = 100..108, four of them the prompt; the states of token p are p + layer / 10.
    rows = dataset.rows(captured(), max_rows=99)
    assert rows.input_ids.tolist() == [101, 102, 103, 104, 105, 106, 107]  # x[p+1]
    assert rows.next_ids.tolist() == [102, 103, 104, 105, 106, 107, 108]  # x[p+2]
    assert rows.hidden[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]  # g[p]
    assert rows.hidden[0].tolist() == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.2])
    assert rows.target[:, 0].tolist() == pytest.approx([1.3, 2.3, 3.3, 4.3, 5.3, 6.3, 7.3])  # y[p+1]
    # The answer starts at token 4: the first trained row is the one whose input it is.
    assert rows.loss_mask.tolist() == [False] * 3 + [True] * 4


def test_every_answer_of_a_conversation_is_trained_on_and_nothing_between():
    one = captured(prompt=4, answer=9)
    one.sequence.answers = [(4, 7), (9, 13)]
    generated = {p for start, end in one.sequence.answers for p in range(start, end)}
    rows = dataset.rows(one, max_rows=99)
    for p, trained in enumerate(rows.loss_mask.tolist()):
        # Row p is served once token p+1 is known, and proposes token p+2, which an answer's end leaves out.
        assert trained == (p + 1 in generated and p + 2 in generated), p
    assert dataset.answer_counts([one.sequence]) == Counter(one.sequence.token_ids[i] for i in generated)


def test_rows_agree_with_speculators():
    from speculators.models.eagle3.data import shift_batch

    one = captured(prompt=3, answer=6)
    count = one.sequence.num_states
    theirs = shift_batch(
        {
            "input_ids": torch.tensor(one.sequence.token_ids[:count]),
            "hidden_states": one.states[:, :-1].flatten(1),
            "verifier_last_hidden_states": one.states[:, -1],
            "loss_mask": torch.arange(count) >= one.sequence.num_prompt_tokens,
            "lengths": torch.tensor([count]),
            "position_ids": torch.arange(count),
        }
    )
    ours = dataset.rows(one, max_rows=99)
    assert torch.equal(ours.input_ids, theirs["input_ids"])
    assert torch.equal(ours.hidden, theirs["hidden_states"])
    assert torch.equal(ours.target, theirs["verifier_last_hidden_states"])
    assert torch.equal(ours.loss_mask, theirs["loss_mask"])


def test_a_long_sequence_is_cut():
    assert len(dataset.rows(captured(prompt=4, answer=50), max_rows=16)) == 16


def test_a_prompt_shorter_than_the_test_depth_is_refused():
    with pytest.raises(dataset.DatasetError, match="training-time test needs 3"):
        dataset.rows(captured(prompt=2), max_rows=16, ttt_steps=3)


def packs_of(sequences, *args, **kwargs):
    lengths = [len(s) for s in sequences]
    return (dataset.pack([sequences[i] for i in chosen]) for chosen in dataset.schedule(lengths, *args, **kwargs))


def test_an_epoch_has_every_sequence_once_and_no_pack_is_too_long():
    sequences = [dataset.rows(captured(prompt=3, answer=a), max_rows=99) for a in (3, 5, 7, 9, 11)]
    packs = packs_of(sequences, 20, seed=3)
    seen, rows = Counter(), 0
    while rows < 2 * sum(map(len, sequences)):
        pack = next(packs)
        rows += len(pack)
        assert len(pack) <= 20
        for document in range(int(pack.document_ids.max()) + 1):
            mine = pack.document_ids == document
            seen[int(mine.sum())] += 1
            assert pack.position_ids[mine].tolist() == list(range(int(mine.sum())))
    assert set(seen) == {len(s) for s in sequences}
    assert max(seen.values()) - min(seen.values()) <= 1


def test_a_weighted_sequence_comes_more_often():
    sequences = [dataset.rows(captured(prompt=3, answer=a), max_rows=99) for a in (3, 30)]
    packs = islice(packs_of(sequences, 1, seed=0, weights=[2.5, 1.0]), 700)
    seen = Counter(len(pack) for pack in packs)
    assert seen[len(sequences[0])] / seen[len(sequences[1])] == pytest.approx(2.5, rel=0.1)


def test_the_order_follows_the_seed():
    sequences = [dataset.rows(captured(prompt=3, answer=a), max_rows=99) for a in (3, 5, 7, 9, 11)]

    def order(seed):
        return [len(pack) for pack in islice(packs_of(sequences, 12, seed), 12)]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_answers_of_one_token_teach_nothing():
    with pytest.raises(dataset.DatasetError, match="raise max_new_tokens"):
        dataset.require_learnable([captured(answer=1).sequence], max_rows=9)
    with pytest.raises(dataset.DatasetError, match="raise max_new_tokens"):
        dataset.require_learnable([captured(prompt=12).sequence], max_rows=9)


def test_every_domain_is_held_out_in_part():
    sequences = [captured(key=f"{d}{i}", domain=d) for d in ("chat", "code") for i in range(10)]
    train, held_out = dataset.split(sequences, 0.2, seed=0)
    assert Counter(c.sequence.domain for c in held_out) == {"chat": 2, "code": 2}
    assert not {c.sequence.key for c in train} & {c.sequence.key for c in held_out}
    # However the sequences come in.
    again = dataset.split(sequences[::-1], 0.2, seed=0)[1]
    assert {c.sequence.key for c in again} == {c.sequence.key for c in held_out}
    with pytest.raises(dataset.DatasetError, match="domain chat has one captured sequence"):
        dataset.split([captured(domain="chat")], 0.2, seed=0)


@given(
    answers=st.lists(st.lists(st.integers(0, 59), min_size=2, max_size=20), min_size=1, max_size=5),
    size=st.integers(1, 80),
)
def test_the_draft_vocabulary_holds_the_most_frequent_tokens(answers, size):
    counts = dataset.answer_counts(captured(prompt=1, tokens=[59, *answer]).sequence for answer in answers)
    vocab = dataset.draft_vocab(counts, vocab_size=60, draft_vocab_size=size)
    ids = vocab.target_ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == min(size, 60) == int(vocab.t2d.sum())
    assert all(vocab.t2d[i] for i in ids)
    left_out = [counts[t] for t in range(60) if t not in ids]
    assert max(left_out, default=0) <= min(counts[t] for t in ids) or max(left_out, default=0) == 0
    generated = [token for answer in answers for token in answer]
    assert vocab.coverage == pytest.approx(sum(t in ids for t in generated) / len(generated))
