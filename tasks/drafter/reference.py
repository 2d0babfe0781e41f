"""EAGLE-3's first proposal in plain torch: an oracle for heads that other code has written or loaded."""

import torch
from torch.nn.functional import linear, silu


def first_logits(
    weights: dict[str, torch.Tensor],
    config: dict,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    input_ids: torch.Tensor,
) -> torch.Tensor:
    """Logits [rows, draft_vocab_size] that a head gives for one sequence, in the dtype of its weights.

    weights, config: of the head, in the format of speculators. embedding: the target's [vocab_size, hidden_size].
    hidden: [rows, aux_layers * hidden_size]; input_ids: [rows].
    """
    layer_config = config["transformer_layer_config"]
    eps = layer_config["rms_norm_eps"]
    fused = linear(hidden, weights["fc.weight"])
    x = fused
    for i in range(layer_config["num_hidden_layers"]):
        layer = {n.removeprefix(f"layers.{i}."): w for n, w in weights.items() if n.startswith(f"layers.{i}.")}
        if i == 0:
            embedded = _rms_norm(embedding[input_ids], layer["input_layernorm.weight"], eps)
            normed = _rms_norm(fused, layer["hidden_norm.weight"], eps)
            residual = normed if config["norm_before_residual"] else fused
            x = residual + _attention(torch.cat([embedded, normed], dim=-1), layer, layer_config)
        else:
            x = x + _attention(_rms_norm(x, layer["input_layernorm.weight"], eps), layer, layer_config)
        normed = _rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        gated = silu(linear(normed, layer["mlp.gate_proj.weight"])) * linear(normed, layer["mlp.up_proj.weight"])
        x = x + linear(gated, layer["mlp.down_proj.weight"])
    return linear(_rms_norm(x, weights["norm.weight"], eps), weights["lm_head.weight"])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _attention(x: torch.Tensor, layer: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    """Causal self-attention with rotary positions 0.. over one sequence [rows, width]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = len(x)
    q, k, v = (linear(x, layer[f"self_attn.{n}_proj.weight"]).view(rows, -1, config["head_dim"]) for n in "qkv")
    q, k = _rotate(q, config), _rotate(k, config)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / config["head_dim"] ** 0.5
    future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, float("-inf")).softmax(-1)
    return linear(torch.einsum("hqk,khd->qhd", attended, v).reshape(rows, -1), layer["self_attn.o_proj.weight"])


def _rotate(x: torch.Tensor, config: dict) -> torch.Tensor:
    """Rotary embedding of [rows, heads, head_dim] in the half-split layout."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = rotary(x, torch.arange(len(x))[None])
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[0][:, None].to(x.dtype) + swapped * sin[0][:, None].to(x.dtype)
