"""Attention within packed micro-batches: exact, and no mask of the whole row.

A group's prompt attends to itself, an answer to its prompt and itself. On CPU, and on GPUs in float32, a group is cut
into spans of queries, each computed against the keys that it can see; on GPUs in half precision the row is one call of
FlashAttention over sequences of different lengths, for which every answer gets its prompt's keys again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from tasks.rl.errors import TrainerError

NAME = "lockstep_packed"
_SPAN_TOKENS = 256
"""Short answers are computed together up to this many tokens: what their mask wastes costs less than another call."""
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Span:
    """Queries [start, stop) of a row, against the keys [prompt, prompt + prompt_tokens) and [start, stop).

    mask: bool [stop - start, keys], keys in the row's order; none where the span is one prompt or one answer, which is
    causal. The first span of a group begins with the prompt itself.
    """

    prompt: int
    prompt_tokens: int
    start: int
    stop: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Sequences:
    """The row as sequences of different lengths, the last query of each at its last key: int32 offsets of queries and
    keys [S + 1], the keys' places in the row [K], and the longest of both."""

    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int


class Layout:
    """groups: (tokens of the prompt, tokens of each answer), in the row's order. device: of masks and offsets.
    whole_keys: FlashAttention takes a sequence's keys in one piece, so that what else is in the row decides no bit.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, list[int]]],
        device: torch.device | str = "cpu",
        *,
        whole_keys: bool = False,
    ):
        self.whole_keys = whole_keys
        self._groups = [(prompt, [tokens for tokens in answers if tokens]) for prompt, answers in groups]
        self._device = device

    @cached_property
    def spans(self) -> list[Span]:
        """Spans that cover the row, in order."""
        found, start = [], 0
        for prompt, answers in self._groups:
            first, end, members = start, start, []
            for tokens in [prompt, *answers]:
                if members and end + tokens - start > _SPAN_TOKENS:
                    found.append(self._span(first, prompt, start, members))
                    start, members = end, []
                members.append(tokens)
                end += tokens
            found.append(self._span(first, prompt, start, members))
            start = end
        return found

    def _span(self, first: int, prompt: int, start: int, members: list[int]) -> Span:
        stop = start + sum(members)
        if len(members) == 1:
            return Span(first, prompt, start, stop, None)
        lengths = members if start == first else [prompt, *members]
        section = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        visible = (section == 0) | (section[:, None] == section)
        return Span(first, prompt, start, stop, visible.tril()[start - stop :].to(self._device))

    @cached_property
    def sequences(self) -> Sequences:
        """Prompts and answers as sequences, in the row's order."""
        queries, keys, places, start = [0], [0], [], 0
        for prompt, answers in self._groups:
            first, end = start, start
            for number, tokens in enumerate([prompt, *answers]):
                shared = torch.arange(first, first + prompt if number else first)
                places += [shared, torch.arange(end, end + tokens)]
                end += tokens
                queries.append(end)
                keys.append(keys[-1] + len(shared) + tokens)
            start = end
        offsets = [torch.tensor(o, dtype=torch.int32) for o in (queries, keys)]
        longest = [int(o.diff().max()) for o in offsets]
        return Sequences(*(o.to(self._device) for o in offsets), torch.cat(places).to(self._device), *longest)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: [B, T, heads, D] from query [B, heads, T, D] and key and value [B, key heads,
    T, D].

    layout: of the single row, which is causal as a whole without one.
    Raises TrainerError for a kind of attention that is not computed here.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise TrainerError(
                f"{type(module).__name__} asks for {name}: only plain full attention can be trained here"
            )
    if layout is None:
        return _attend(query, key, value, scaling, causal=True).transpose(1, 2), None
    if query.is_cuda and query.dtype != torch.float32:
        return _varlen(query, key, value, scaling, layout), None
    parts = [_span(query, key, value, scaling, span) for span in layout.spans]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _span(query, key, value, scaling, span: Span) -> torch.Tensor:
    own, shared = slice(span.start, span.stop), slice(span.prompt, span.prompt + span.prompt_tokens)
    if span.start == span.prompt:
        k, v = key[:, :, own], value[:, :, own]
        return _attend(query[:, :, own], k, v, scaling, mask=span.mask, causal=span.mask is None)
    k, v = (torch.cat([x[:, :, shared], x[:, :, own]], dim=2) for x in (key, value))
    if span.mask is not None:
        return _attend(query[:, :, own], k, v, scaling, mask=span.mask)
    # One long answer: with the prompt's queries before its own it is causal, which skips what is not visible.
    q = torch.cat([query[:, :, shared], query[:, :, own]], dim=2)
    return _attend(q, k, v, scaling, causal=True)[:, :, span.prompt_tokens :]


def _attend(query, key, value, scaling, *, mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def _varlen(query, key, value, scaling, layout: Layout) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    sequences = layout.sequences
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attn(
        q.contiguous(),
        k.index_select(0, sequences.keys),
        v.index_select(0, sequences.keys),
        sequences.query_offsets,
        sequences.key_offsets,
        sequences.longest_query,
        sequences.longest_key,
        scale=scaling,
        window_size=(-1, 0),
        num_splits=1 if layout.whole_keys else None,
        enable_gqa=q.shape[1] != k.shape[1],
    )[None]
