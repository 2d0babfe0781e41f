"""EAGLE-3's training-time test: the head's loss on a pack, and what it proposes at rows of it.

speculators' own forward spends most of its time on what no loss reads: every row takes every step, through a mask of
the whole pack, up to logits over the draft vocabulary. It also needs packs of a multiple of 128 rows, and a compiler.
Here a row that no loss reads gives its key and value to those behind it and nothing else, and a document attends within
itself:

    step 0      row q attends to the keys of rows p <= q of its document
    step j      row q attends to those and to its own keys of steps 1..j, at rotary position q + j
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from infra.config.drafter import DrafterConfig
from tasks.drafter.attention import Attention, Dense
from tasks.drafter.attention.base import Keys
from tasks.drafter.dataset import Rows


@dataclass(frozen=True)
class Plan:
    """Which rows of a pack are computed, looked up before they are.

    wanted: the rows that any step's logits come from, ascending. trained: those that the loss reads; places: for each
    step, where in `wanted` the rows lie that propose for these. attention: of the rows `wanted`; every: of all rows,
    which layers below the last one compute.
    """

    wanted: torch.Tensor
    trained: torch.Tensor
    places: list[torch.Tensor]
    attention: Attention
    every: Attention | None

    def to(self, device: str) -> "Plan":
        """The same on `device`, without waiting for it."""
        wanted, trained, *places = (t.to(device, non_blocking=True) for t in (self.wanted, self.trained, *self.places))
        return Plan(wanted, trained, places, self.attention.to(device), self.every and self.every.to(device))


def plan(batch: Rows, steps: int, layers: int, way: type[Attention] = Dense) -> Plan:
    """What the loss of `batch` needs. layers: of the head."""
    trained = batch.loss_mask.nonzero().flatten()
    wanted = torch.zeros_like(batch.loss_mask)
    for step in range(steps):
        wanted[trained - step] = True
    place = wanted.cumsum(0) - 1
    asked = _plan(batch, wanted.nonzero().flatten(), layers, way)
    return replace(asked, trained=trained, places=[place[trained - step] for step in range(steps)])


def _plan(batch: Rows, wanted: torch.Tensor, layers: int, way: type[Attention]) -> Plan:
    every = way.of(batch.document_ids, torch.arange(len(batch), device=wanted.device)) if layers > 1 else None
    return Plan(wanted, wanted[:0], [], way.of(batch.document_ids, wanted), every)


def loss(model: torch.nn.Module, batch: Rows, trained: int, config: DrafterConfig, losses: dict) -> torch.Tensor:
    """Sum over the trained rows divided by `trained`, nats, summed over the steps with weights `ttt_decay**j`.

    At step j a trained row's target is proposed by the row j before it. losses: as speculators resolves them, (function
    of logits and targets [1, rows, draft vocabulary], weight) by name. Computed as `batch.plan` says where it has one.
    """
    asked = batch.plan or plan(batch, config.ttt_steps, len(model.layers))
    with torch.no_grad():
        targets = model.verifier_lm_head(_normed(model.verifier_norm, batch.target[asked.trained]))[None]
    total = torch.zeros((), device=batch.target.device)
    for step, hidden in enumerate(_outputs(model, batch, asked, config.ttt_steps)):
        logits = model.lm_head(_normed(model.norm, _taken(hidden, asked.places[step])))[None]
        each = sum(weight * of(logits, targets) for of, weight in losses.values())
        total = total + config.ttt_decay**step * each.sum() / trained
    return total


@torch.no_grad()
def proposals(model: torch.nn.Module, batch: Rows, wanted: torch.Tensor, steps: int) -> torch.Tensor:
    """Draft ids [steps, wanted] that the head proposes at the rows `wanted` (ascending), each given that the earlier
    ones were right."""
    asked = _plan(batch, wanted, len(model.layers), Dense)
    outputs = _outputs(model, batch, asked, steps)
    return torch.stack([model.lm_head(_normed(model.norm, hidden)).argmax(dim=-1) for hidden in outputs])


@torch.no_grad()
def last_logits(model: torch.nn.Module, batch: Rows) -> torch.Tensor:
    """Logits [4, draft vocabulary] of the first proposal at the last four rows."""
    wanted = torch.arange(len(batch) - 4, len(batch), device=batch.input_ids.device)
    hidden = next(_outputs(model, batch, _plan(batch, wanted, len(model.layers), Dense), 1))
    return model.lm_head(_normed(model.norm, hidden))


def _outputs(model: torch.nn.Module, batch: Rows, asked: Plan, steps: int) -> Iterator[torch.Tensor]:
    """The head's output before its final norm at the rows asked for, [wanted, hidden], step after step.

    Row p of step j is fed token p + j of `input_ids`: behind the end of its document that is another's, and its output
    means nothing.
    """
    wanted, fed = asked.wanted, F.pad(batch.input_ids, (0, steps))
    hidden, kept = model.fc(batch.hidden), []
    first, *later = _rotary(model, batch, wanted, steps, hidden)
    for number, layer in enumerate(model.layers):
        inputs, residual = _inputs(layer, number, model.embed_tokens(batch.input_ids), hidden)
        kept.append(Keys(_key_value(layer.self_attn, inputs, first)))
        if number + 1 < len(model.layers):  # the next layer attends to all of them
            hidden = _layer(layer, inputs, residual, first, kept[-1], asked.every)
        else:
            rotary = tuple(part[wanted] for part in first)
            hidden = _layer(layer, _taken(inputs, wanted), _taken(residual, wanted), rotary, kept[-1], asked.attention)
    yield hidden
    for step, rotary in enumerate(later, 1):
        embeds = model.embed_tokens(fed[wanted + step])
        for number, layer in enumerate(model.layers):
            inputs, residual = _inputs(layer, number, embeds, hidden)
            kept[number].own.append(_key_value(layer.self_attn, inputs, rotary))
            hidden = _layer(layer, inputs, residual, rotary, kept[number], asked.attention)
        yield hidden


def _rotary(
    model: torch.nn.Module, batch: Rows, wanted: torch.Tensor, steps: int, like: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(cosines, sines) [rows, 1, size] of all rows at step 0, then of those asked for at each later one."""
    positions = [batch.position_ids, *(batch.position_ids[wanted] + step for step in range(1, steps))]
    parts = (part[0, :, None] for part in model.rotary_emb(like, torch.cat(positions)[None]))
    return list(zip(*(part.split([len(p) for p in positions]) for part in parts), strict=True))


def _inputs(
    layer: torch.nn.Module, number: int, embeds: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input of attention, what its output is added to). The first layer takes the tokens' embeddings too."""
    if number:
        return _normed(layer.input_layernorm, hidden), hidden
    normed = _normed(layer.hidden_norm, hidden)
    inputs = torch.cat([_normed(layer.input_layernorm, embeds), normed], dim=-1)
    return inputs, normed if layer.norm_before_residual else hidden


def _normed(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`norm(x)` of an RMSNorm, as one kernel in place of six."""
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.variance_epsilon)


def _taken(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`x[rows]`, whose gradient is added up where `x[rows]` would sort the rows first."""
    return x.index_select(0, rows)


def _heads(projected: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, heads * size] as [rows, heads, size]."""
    return projected.unflatten(-1, (-1, size))


def _rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x: [rows, heads, size]."""
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
    keys: Keys,
    asked: Attention,
) -> torch.Tensor:
    attention = layer.self_attn
    query = _rotated(_heads(attention.q_proj(inputs), attention.head_dim), rotary) * attention.scaling
    hidden = residual + attention.o_proj(asked.attend(query, keys).flatten(1))
    return hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
