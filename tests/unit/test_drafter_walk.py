"""The count of acceptances, against decoding one block after the other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.drafter.walk import Walk, walk


@given(
    tokens=st.lists(st.integers(0, 2), min_size=6, max_size=40),
    draft=st.integers(0, 2**32),
    k=st.integers(1, 4),
    prompt=st.integers(1, 4),
)
def test_walking_is_speculative_decoding(tokens, draft, k, prompt):
    # Token p + 1 follows token p; the drafter proposes from row p, whose input is token p + 1.
    num_rows = len(tokens) - 2
    generator = torch.Generator().manual_seed(draft)
    proposals = torch.randint(0, 3, (k, num_rows), generator=generator)
    counted = walk(proposals, torch.tensor(tokens[2:]), prompt - 1)

    drafts, accepted = 0, [0] * k
    known = prompt + 1  # the prompt and the first token, which the target samples before anything is proposed
    while known + k <= len(tokens):
        row = known - 2
        proposed = [int(proposals[i, row]) for i in range(k)]
        drafts += 1
        right = 0
        while right < k and proposed[right] == tokens[known + right]:
            accepted[right] += 1
            right += 1
        known += right + 1
    assert (counted.drafts, counted.accepted) == (drafts, accepted)


def test_the_length_counts_the_bonus_token():
    assert Walk().length == 1
    assert Walk(10, [8, 4, 2]).length == 1 + 14 / 10
    assert Walk(10, [8, 4]) + Walk(5, [5, 5]) == Walk(15, [13, 9])
    assert Walk() + Walk(5, [5, 5]) == Walk(5, [5, 5])


def test_a_perfect_drafter_reaches_the_ceiling():
    tokens = torch.arange(30)
    proposals = torch.stack([tokens[2:] + i for i in range(3)])
    assert walk(proposals, tokens[2:], 4).length == 4
