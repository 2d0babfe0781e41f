"""Attention by masked products: a document within itself, computed together with others of about its length."""

from dataclasses import dataclass
from typing import Self

import torch

from tasks.drafter.attention.base import Attention, Keys

SHORTEST = 32
"""Rows. Documents no longer than this are computed together, then those up to twice as long, and so on."""


@dataclass(frozen=True)
class Documents:
    """Documents of about the same length, padded to the longest.

    queries: [documents, queries] places in the rows asked for; filled: places in these, flattened, that are no padding.
    keys: [documents, keys] rows of the pack, up to the last that a query sees.
    hidden: bool [documents, queries, keys], keys that come behind a query, or are padding.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    hidden: torch.Tensor
    filled: torch.Tensor


@dataclass(frozen=True)
class Dense(Attention):
    """documents: all that have rows asked for."""

    documents: list[Documents]

    @classmethod
    def of(cls, document_ids: torch.Tensor, wanted: torch.Tensor) -> Self:
        return cls(_documents(document_ids, wanted) if len(wanted) else [])

    def to(self, device: str) -> Self:
        move = [{name: t.to(device, non_blocking=True) for name, t in vars(some).items()} for some in self.documents]
        return type(self)([Documents(**moved) for moved in move])

    def attend(self, query: torch.Tensor, keys: Keys) -> torch.Tensor:
        attended = query * 0  # a rank whose pack has no document goes through the motions
        for some in self.documents:
            attended[some.queries.flatten()[some.filled]] = _attend(query, keys, some).to(query.dtype)
        return attended


def _documents(document_ids: torch.Tensor, wanted: torch.Tensor) -> list[Documents]:
    device, lengths = wanted.device, document_ids.bincount()
    ends = lengths.cumsum(0)
    bounds = torch.searchsorted(wanted, torch.cat([ends.new_zeros(1), ends]))
    starts, stops = bounds[:-1], bounds[1:]
    firsts = ends - lengths
    sizes = wanted[(stops - 1).clamp(min=0)] + 1 - firsts  # keys that its last query sees
    found = []
    classes = sizes.clamp(min=SHORTEST).log2().ceil().int().where(stops > starts, -1)
    for same in classes.unique().tolist():
        if same < 0:
            continue
        which = (classes == same).nonzero().flatten()
        start, stop, first, size = (part[which, None] for part in (starts, stops, firsts, sizes))
        queries = start + torch.arange(int((stop - start).max()), device=device)
        keys = first + torch.arange(int(size.max()), device=device)
        filled, queries, seen = queries < stop, queries.minimum(stop - 1), keys < first + size
        keys = keys.minimum(first + size - 1)
        visible = (keys[:, None] <= wanted[queries][..., None]) & seen[:, None]
        found.append(Documents(queries, keys, ~visible, filled.flatten().nonzero().flatten()))
    return found


def _attend(query: torch.Tensor, keys: Keys, documents: Documents) -> torch.Tensor:
    """[queries, heads, size] of all queries of some documents, one document after the other."""
    key, value = (part.transpose(0, 1)[:, documents.keys] for part in keys.first)
    own = [[part.transpose(0, 1)[:, documents.queries][:, :, None] for part in pair] for pair in keys.own]
    # [key heads, documents, query heads of each, queries, size]: those that share a key head are rows of one product.
    q = query.transpose(0, 1)[:, documents.queries].unflatten(0, (len(key), -1)).transpose(1, 2)
    scores = (q.flatten(2, 3) @ key.mT).unflatten(2, q.shape[2:4])
    scores = scores.masked_fill(documents.hidden[:, None], -torch.inf)
    scores = torch.cat([scores, *((q * k).sum(dim=-1, keepdim=True) for k, _ in own)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    seen, rest = weights[..., : key.shape[2]], weights[..., key.shape[2] :]
    out = (seen.flatten(2, 3) @ value).unflatten(2, q.shape[2:4])
    for number, (_, v) in enumerate(own):
        out = out + rest[..., number : number + 1] * v
    return out.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)[documents.filled]
