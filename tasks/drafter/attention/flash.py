"""Attention by PyTorch's flash kernels for sequences of different lengths: no mask, no scores and no padding in memory.

The kernels attend to the keys of step 0. A row's own keys of later steps are few and its alone; they join by the sums
of exponents: with L0 the log of the kernels' sum and s_j the score of own key j,

    L = log(e^L0 + sum_j e^s_j),  out = e^(L0 - L) out0 + sum_j e^(s_j - L) v_j

Backwards, a kernel that is given `out` and `L` in place of its own computes its part of the whole softmax's gradient:
it takes probabilities as e^(score - L), and of the output only the product with its gradient (as ring attention does
over devices, Liu, Zaharia and Abbeel 2023).
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from tasks.drafter.attention.base import Attention, Keys


@dataclass(frozen=True)
class Flash(Attention):
    """Stretches of rows asked for that follow each other in one document, each with all keys up to its last row.

    keys: [keys] rows of the pack, stretch after stretch. query_ends, key_ends: int32 [stretches + 1] where each begins
    in the rows asked for, and in `keys`. most_queries, most_keys: of one stretch.
    """

    keys: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, document_ids: torch.Tensor, wanted: torch.Tensor) -> Self:
        document, place = document_ids[wanted], torch.arange(len(wanted), device=wanted.device)
        begins = torch.ones(len(wanted), dtype=torch.bool, device=wanted.device)
        begins[1:] = (wanted.diff() != 1) | (document.diff() != 0)
        starts = place[begins]
        stops = torch.cat([starts[1:], starts.new_full((min(1, len(wanted)),), len(wanted))])
        first = torch.searchsorted(document_ids, document[starts])
        lengths = wanted[stops - 1] + 1 - first
        before = lengths.cumsum(0) - lengths
        keys = torch.arange(int(lengths.sum()), device=wanted.device) - (before - first).repeat_interleave(lengths)
        queries = stops - starts
        return cls(
            keys,
            _ends(queries),
            _ends(lengths),
            int(queries.max()) if len(starts) else 0,
            int(lengths.max()) if len(starts) else 0,
        )

    def to(self, device: str) -> Self:
        parts = (getattr(self, each.name) for each in fields(self))
        return type(self)(*(p.to(device, non_blocking=True) if isinstance(p, torch.Tensor) else p for p in parts))

    def attend(self, query: torch.Tensor, keys: Keys, kernels: "type[Kernels] | None" = None) -> torch.Tensor:
        """kernels: in place of PyTorch's, which only GPUs have."""
        if not len(self.keys):  # a rank whose pack has no document goes through the motions
            return query * 0
        kernels = kernels or Kernels
        first = [part.to(kernels.dtype).index_select(0, self.keys) for part in keys.first]
        own = [torch.stack(each, dim=1).to(kernels.dtype) for each in zip(*keys.own, strict=True)] or [None, None]
        return _Joined.apply(query.to(kernels.dtype), *first, *own, self, kernels)


class Kernels:
    """PyTorch's, as `torch.nn.attention.varlen` calls them. Causal by the last row: the last query sees all keys."""

    dtype = torch.bfloat16

    @staticmethod
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Flash
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """(out [queries, heads, size], log of the sum of exponents [heads, queries], state of the kernels)."""
        out, logsumexp, state, _, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_layout(layout), 0.0, True, False, scale=1.0, window_size_left=-1, window_size_right=0
        )
        return out, logsumexp, state

    @staticmethod
    def backward(
        gradient: torch.Tensor, tensors: tuple[torch.Tensor, ...], state: Any, layout: Flash
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value. tensors: query, key, value, out, log of the sum of exponents."""
        unused = gradient.new_empty(0)
        return torch.ops.aten._flash_attention_backward(
            gradient, *tensors, *_layout(layout), 0.0, True, state, unused,
            scale=1.0, window_size_left=-1, window_size_right=0,
        )  # fmt: skip


class _Joined(torch.autograd.Function):
    """query: [wanted, heads, size]; key, value: [keys, key heads, size]; own_key, own_value: [wanted, own keys, key
    heads, size], or None. Products of a row with its own keys are computed in float32."""

    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, layout: Flash, kernels: type[Kernels]) -> torch.Tensor:
        out, total, state = kernels.forward(query, key, value, layout)
        shares = None
        if own_key is not None:
            scores = (_by_key_head(query, key).float() * own_key[:, :, :, None]).sum(-1).flatten(2)
            before = total.mT[:, None]
            whole = torch.cat([before, scores], dim=1).logsumexp(dim=1)
            first, shares = (before[:, 0] - whole).exp(), (scores - whole[:, None]).exp()
            out = first[..., None] * out + _spread(shares, own_value, key.shape[1]).sum(1)
            out, total = out.to(query.dtype), whole.mT.contiguous()
        ctx.layout, ctx.kernels, ctx.state = layout, kernels, state
        ctx.save_for_backward(query, key, value, out, total, own_key, own_value, shares)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        query, key, value, out, total, own_key, own_value, shares = ctx.saved_tensors
        gradient, heads = gradient.to(query.dtype).contiguous(), key.shape[1]
        found = ctx.kernels.backward(gradient, (query, key, value, out, total), ctx.state, ctx.layout)
        if own_key is None:
            return *found, None, None, None, None
        dq, dk, dv = found
        grouped = _by_key_head(gradient, key).float()
        by_score = (grouped * own_value[:, :, :, None]).sum(-1).flatten(2) - (gradient.float() * out).sum(-1)[:, None]
        by_score = by_score * shares
        dq = (dq + _spread(by_score, own_key, heads).sum(1)).to(query.dtype)
        down = (part.unflatten(2, (heads, -1))[..., None] for part in (by_score, shares))
        ups = (_by_key_head(query, key), grouped)
        d_own = [(weight * up).sum(3).to(own_key.dtype) for weight, up in zip(down, ups, strict=True)]
        return dq, dk, dv, *d_own, None, None


def _by_key_head(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[wanted, 1, key heads, query heads of each, size]: heads that share a key head follow each other."""
    return query.unflatten(1, (key.shape[1], -1))[:, None]


def _spread(weights: torch.Tensor, own: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Own keys or values times `weights` [wanted, own keys, heads], as [wanted, own keys, heads, size] in float32."""
    return (weights.unflatten(2, (key_heads, -1))[..., None] * own[:, :, :, None]).flatten(2, 3)


def _layout(layout: Flash) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return layout.query_ends, layout.key_ends, layout.most_queries, layout.most_keys


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
