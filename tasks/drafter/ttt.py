"""EAGLE-3's training-time test: the head's loss on a pack, and what it proposes at rows of it.

speculators' own forward spends most of its time on what no loss reads: every row takes every step, through a mask of
the whole pack, up to logits over the draft vocabulary. It also needs packs of a multiple of 128 rows, and a compiler.
Here a row that no loss reads gives its key and value to those behind it and nothing else, and a document attends within
itself, computed together with others of about its length:

    step 0      row q attends to the keys of rows p <= q of its document
    step j      row q attends to those and to its own keys of steps 1..j, at rotary position q + j
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from infra.config.drafter import DrafterConfig
from tasks.drafter.dataset import Rows

SHORTEST = 32
"""Rows. Documents no longer than this are computed together, then those up to twice as long, and so on."""


def loss(model: torch.nn.Module, batch: Rows, trained: int, config: DrafterConfig, losses: dict) -> torch.Tensor:
    """Sum over the trained rows divided by `trained`, nats, summed over the steps with weights `ttt_decay**j`.

    At step j a trained row's target is proposed by the row j before it. losses: as speculators resolves them, (function
    of logits and targets [1, rows, draft vocabulary], weight) by name.
    """
    rows = batch.loss_mask.nonzero().flatten()
    wanted = torch.cat([rows - step for step in range(config.ttt_steps)]).unique()
    with torch.no_grad():
        targets = model.verifier_lm_head(model.verifier_norm(batch.target[rows]))[None]
    total = torch.zeros((), device=rows.device)
    for step, hidden in enumerate(_outputs(model, batch, wanted, config.ttt_steps)):
        logits = model.lm_head(model.norm(hidden[torch.searchsorted(wanted, rows - step)]))[None]
        each = sum(weight * of(logits, targets) for of, weight in losses.values())
        total = total + config.ttt_decay**step * each.sum() / trained
    return total


@torch.no_grad()
def proposals(model: torch.nn.Module, batch: Rows, wanted: torch.Tensor, steps: int) -> torch.Tensor:
    """Draft ids [steps, wanted] that the head proposes at the rows `wanted` (ascending), each given that the earlier
    ones were right."""
    return torch.stack([model.lm_head(model.norm(h)).argmax(dim=-1) for h in _outputs(model, batch, wanted, steps)])


@torch.no_grad()
def last_logits(model: torch.nn.Module, batch: Rows) -> torch.Tensor:
    """Logits [4, draft vocabulary] of the first proposal at the last four rows."""
    wanted = torch.arange(len(batch) - 4, len(batch), device=batch.input_ids.device)
    return model.lm_head(model.norm(next(_outputs(model, batch, wanted, 1))))


@dataclass(frozen=True)
class _Documents:
    """Documents of about the same length, padded to the longest.

    queries: [documents, queries] places in the rows asked for; filled: bool, which of them are no padding.
    keys: [documents, keys] rows of the pack, up to the last that a query sees.
    hidden: bool [documents, queries, keys], keys that come behind a query, or are padding.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    hidden: torch.Tensor
    filled: torch.Tensor


@dataclass
class _Keys:
    """What a layer attends to: key and value [key heads, rows, size] of step 0, and of the rows asked for of each later
    step."""

    first: tuple[torch.Tensor, torch.Tensor]
    own: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def _outputs(model: torch.nn.Module, batch: Rows, wanted: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """The head's output before its final norm at the rows `wanted`, [wanted, hidden], step after step.

    Row p of step j is fed token p + j of `input_ids`: behind the end of its document that is another's, and its output
    means nothing.
    """
    every, fed = torch.arange(len(batch), device=wanted.device), F.pad(batch.input_ids, (0, steps))
    documents, all_documents = _documents(batch, wanted), None
    hidden, kept = model.fc(batch.hidden), []
    for number, layer in enumerate(model.layers):
        inputs, residual = _inputs(layer, number, model.embed_tokens(batch.input_ids), hidden)
        rotary = model.rotary_emb(inputs, batch.position_ids[None])
        kept.append(_Keys(_key_value(layer.self_attn, inputs, rotary)))
        if number + 1 < len(model.layers):  # the next layer attends to all of them
            all_documents = all_documents or _documents(batch, every)
            hidden = _layer(layer, inputs, residual, rotary, kept[-1], all_documents)
        else:
            rotary = tuple(part[:, wanted] for part in rotary)
            hidden = _layer(layer, inputs[wanted], residual[wanted], rotary, kept[-1], documents)
    yield hidden
    for step in range(1, steps):
        embeds = model.embed_tokens(fed[wanted + step])
        for number, layer in enumerate(model.layers):
            inputs, residual = _inputs(layer, number, embeds, hidden)
            rotary = model.rotary_emb(inputs, batch.position_ids[wanted][None] + step)
            kept[number].own.append(_key_value(layer.self_attn, inputs, rotary))
            hidden = _layer(layer, inputs, residual, rotary, kept[number], documents)
        yield hidden


def _documents(batch: Rows, wanted: torch.Tensor) -> list[_Documents]:
    if not len(wanted):
        return []
    device, lengths = wanted.device, batch.document_ids.bincount()
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
        found.append(_Documents(queries, keys, ~visible, filled))
    return found


def _inputs(
    layer: torch.nn.Module, number: int, embeds: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input of attention, what its output is added to). The first layer takes the tokens' embeddings too."""
    if number:
        return layer.input_layernorm(hidden), hidden
    normed = layer.hidden_norm(hidden)
    return torch.cat([layer.input_layernorm(embeds), normed], dim=-1), normed if layer.norm_before_residual else hidden


def _heads(projected: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, heads * size] as [heads, rows, size]."""
    return projected.unflatten(-1, (-1, size)).transpose(0, 1)


def _rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x: [heads, rows, size]."""
    (cos, sin), half = rotary, x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def _key_value(
    attention: torch.nn.Module, inputs: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    size = attention.head_dim
    return _rotated(_heads(attention.k_proj(inputs), size), rotary), _heads(attention.v_proj(inputs), size)


def _layer(
    layer: torch.nn.Module,
    inputs: torch.Tensor,
    residual: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    keys: _Keys,
    documents: list[_Documents],
) -> torch.Tensor:
    attention = layer.self_attn
    query = _rotated(_heads(attention.q_proj(inputs), attention.head_dim), rotary) * attention.scaling
    attended = query * 0  # a rank whose pack has no document goes through the motions
    for some in documents:
        attended[:, some.queries[some.filled]] = _attend(query, keys, some).to(query.dtype)
    hidden = residual + attention.o_proj(attended.transpose(0, 1).flatten(1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _attend(query: torch.Tensor, keys: _Keys, documents: _Documents) -> torch.Tensor:
    """[heads, queries, size] of all queries of some documents, one document after the other."""
    key, value = (part[:, documents.keys] for part in keys.first)
    own = [[part[:, documents.queries][:, :, None] for part in pair] for pair in keys.own]
    # [key heads, documents, query heads of each, queries, size]: those that share a key head are rows of one product.
    q = query[:, documents.queries].unflatten(0, (len(key), -1)).transpose(1, 2)
    scores = (q.flatten(2, 3) @ key.mT).unflatten(2, q.shape[2:4])
    scores = scores.masked_fill(documents.hidden[:, None], -torch.inf)
    scores = torch.cat([scores, *((q * k).sum(dim=-1, keepdim=True) for k, _ in own)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    seen, rest = weights[..., : key.shape[2]], weights[..., key.shape[2] :]
    out = (seen.flatten(2, 3) @ value).unflatten(2, q.shape[2:4])
    for number, (_, v) in enumerate(own):
        out = out + rest[..., number : number + 1] * v
    return out.transpose(1, 2).flatten(0, 1)[:, documents.filled]
