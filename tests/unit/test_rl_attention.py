"""Packed attention and the head against plain dense computations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl import attention, head
from tasks.rl.attention import Layout
from tasks.rl.errors import TrainerError
from tasks.rl.head import token_logprobs

HEADS, KEY_HEADS, SIZE = 4, 2, 8
groups = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 12), max_size=5)), min_size=1, max_size=4)


def visible(layout: list[tuple[int, list[int]]]) -> torch.Tensor:
    """bool [T, T], straight from the definition: a token sees its group's prompt and its own answer, up to itself."""
    group, branch = [], []
    for number, (prompt, answers) in enumerate(layout):
        for answer, tokens in enumerate([prompt, *answers]):
            group += [number] * tokens
            branch += [answer] * tokens
    g, b = torch.tensor(group), torch.tensor(branch)
    return ((g[:, None] == g) & ((b == 0) | (b[:, None] == b))).tril()


def row(layout: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(prompt + sum(answers) for prompt, answers in layout)
    return [torch.randn(1, heads, tokens, SIZE, dtype=torch.float64) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("span_tokens", [1, 15, 256])
@settings(max_examples=30)
@given(layout=groups)
def test_spans_give_what_a_dense_mask_gives(span_tokens, layout):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SPAN_TOKENS", span_tokens)
        tensors = row(layout)
        found, _ = attention.attention(torch.nn.Identity(), *tensors, None, scaling=0.3, layout=Layout(layout))
    torch.testing.assert_close(found, dense(*tensors, visible(layout)))


@settings(max_examples=30)
@given(layout=groups)
def test_sequences_of_different_lengths_are_what_a_dense_mask_shows(layout):
    """What FlashAttention is given on GPUs: the last query of a sequence is at its last key."""
    found, mask = Layout(layout).sequences, torch.zeros_like(visible(layout))
    for number in range(len(found.query_offsets) - 1):
        first, last = found.query_offsets[number : number + 2].tolist()
        keys = found.keys[found.key_offsets[number] : found.key_offsets[number + 1]]
        for query in range(first, last):
            mask[query, keys[: len(keys) - (last - 1 - query)]] = True
    assert torch.equal(mask, visible(layout))
    assert found.longest_query == int(found.query_offsets.diff().max())
    assert found.longest_key == int(found.key_offsets.diff().max())


def test_attention_of_another_kind_is_refused():
    tensors = row([(3, [2])])
    with pytest.raises(TrainerError, match="asks for softcap"):
        attention.attention(torch.nn.Identity(), *tensors, None, layout=Layout([(3, [2])]), softcap=30.0)


@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_and_gradients_are_those_of_a_whole_softmax(monkeypatch, recompute):
    monkeypatch.setattr(head, "_CHUNK_BYTES", {"cpu": 4 * 50 * 3})  # three rows at once
    torch.manual_seed(0)
    hidden = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    target, upstream = torch.randint(0, 50, (8,)), torch.randn(8)
    found = token_logprobs(hidden, weight, target, 0.7, recompute=recompute)
    gradients = torch.autograd.grad(found, [hidden, weight], upstream)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    table = (wide[0] @ wide[1].t() / 0.7).log_softmax(-1)
    expected = table.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    for ours, exact in zip(gradients, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


def test_a_float32_head_keeps_what_bfloat16_logits_round_away():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16(), torch.randn(500, 32).bfloat16()
    target = torch.randint(0, 500, (64,))
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, target[:, None])[:, 0]
    errors = [
        (token_logprobs(hidden, weight, target, 1.0, float32=wide).double() - exact).abs().max()
        for wide in (True, False)
    ]
    assert errors[0] < 1e-4 < 1e-2 < errors[1]
