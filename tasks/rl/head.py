"""Log-probs of chosen tokens from hidden states, without ever holding more than one copy of the logits."""

from typing import Any

import torch

_CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Float32 logits computed at once: enough rows for a fast product, few enough to stay near the processor."""


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    *,
    float32: bool = False,
    recompute: bool = False,
) -> torch.Tensor:
    """log softmax(hidden @ weight.T / temperature) at `target_N`, float32 [N], nats.

    float32: the logits of half-precision states are accumulated and kept in float32 instead of being rounded first.
    recompute: logits are computed again for the gradient, a chunk at a time, instead of kept.
    """
    keep = torch.is_grad_enabled() and not recompute
    return _TokenLogprobs.apply(hidden_NH, weight_VH, target_N, temperature, float32, keep)


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(logits / T), d logp[target] / d logits = (1[target] - p) / T."""

    @staticmethod
    def forward(ctx: Any, hidden_NH, weight_VH, target_N, temperature, float32, keep):
        ctx.temperature, ctx.float32 = temperature, float32
        ctx.kept = [] if keep else None
        logp_N = torch.empty(len(target_N), dtype=torch.float32, device=hidden_NH.device)
        for rows in _chunks(hidden_NH, weight_VH):
            table = _log_softmax(hidden_NH[rows], weight_VH, temperature, float32)
            logp_N[rows] = table.gather(1, target_N[rows, None]).squeeze(1)
            if ctx.kept is not None:
                ctx.kept.append(table)
        ctx.save_for_backward(hidden_NH, weight_VH, target_N)
        return logp_N

    @staticmethod
    def backward(ctx: Any, grad_N):
        hidden_NH, weight_VH, target_N = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for number, rows in enumerate(_chunks(hidden_NH, weight_VH)):
            states = hidden_NH[rows]
            if ctx.kept is None:
                table = _log_softmax(states, weight_VH, ctx.temperature, ctx.float32)
            else:
                table, ctx.kept[number] = ctx.kept[number], None
            scaled_n = (grad_N[rows] / ctx.temperature)[:, None]
            logits_grad = table.exp_().mul_(-scaled_n).scatter_add_(1, target_N[rows, None], scaled_n)
            logits_grad = logits_grad.to(hidden_NH.dtype)
            if hidden_grad is not None:
                torch.mm(logits_grad, weight_VH, out=hidden_grad[rows])
            if weight_grad is not None and weight_VH.dtype == torch.float32:
                weight_grad.addmm_(logits_grad.t(), states)
            elif weight_grad is not None:
                weight_grad += logits_grad.t() @ states
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight_VH.dtype), None, None, None, None


def _log_softmax(states, weight_VH, temperature: float, float32: bool) -> torch.Tensor:
    if not float32 or states.dtype == torch.float32:
        logits = (states @ weight_VH.t()).float()
    elif states.is_cuda:
        logits = torch.mm(states, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = states.float() @ weight_VH.float().t()
    logits.div_(temperature)
    return logits.sub_(logits.logsumexp(dim=1, keepdim=True))


def _chunks(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> list[slice]:
    size = max(1, _CHUNK_BYTES[hidden_NH.device.type] // (4 * weight_VH.shape[0]))
    return [slice(start, start + size) for start in range(0, len(hidden_NH), size)]
