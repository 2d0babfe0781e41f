"""Policy losses under their published names.

A loss gives every token its own term; an aggregation says how the terms become one number. All are sums over sequences,
divided once by a denominator of the whole batch: so the result does not depend on how sequences are spread over
micro-batches or ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tasks.rl.flat import MAX_LOG_RATIO, Flat


@dataclass(frozen=True)
class Clip:
    """Range of the ratio r = exp(logp - logp_old): [1 - low, 1 + high]; dual: upper bound of r where the advantage is
    negative (Ye et al. 2020)."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True)
class Tokens(Flat):
    """logp_T: under the policy that learns, with gradient. logp_old_T: the same before the step's first update.
    advantage_T, weight_T: of the estimator and the correction. Only logp_T carries a gradient."""

    logp_T: torch.Tensor
    logp_old_T: torch.Tensor
    advantage_T: torch.Tensor
    weight_T: torch.Tensor


TokenLoss = Callable[[Tokens, Clip], tuple[torch.Tensor, torch.Tensor]]
"""(tokens, clip) -> loss term per token [T], unweighted, and bool [T]: where clipping cut the gradient."""


def clipped_ratio(tokens: Tokens, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r) A), and at most -dual * A where A < 0 (PPO with dual clip; GRPO; DAPO with high > low)."""
    ratio_T = (tokens.logp_T - tokens.logp_old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_T = -tokens.advantage_T * ratio_T
    bounded_T = -tokens.advantage_T * ratio_T.clamp(1 - clip.low, 1 + clip.high)
    loss_T = torch.maximum(plain_T, bounded_T)
    dual_T = torch.minimum(loss_T, -tokens.advantage_T * clip.dual)
    negative_T = tokens.advantage_T < 0
    return torch.where(negative_T, dual_T, loss_T), (bounded_T > plain_T) | (negative_T & (dual_T < loss_T))


def sequence_ratio(tokens: Tokens, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO (Zheng et al. 2025), token form: s = exp(mean of log r over the sequence), gradient through each token's
    own log-prob: sg[s] * pi / sg[pi]."""
    mean_S = tokens.sum((tokens.logp_T - tokens.logp_old_T).detach())
    mean_S = mean_S / tokens.lengths(mean_S.dtype).clamp(min=1)
    ratio_T = (tokens.logp_T - tokens.logp_T.detach() + mean_S[tokens.sequence_T]).clamp(max=10.0).exp()
    plain_T = -tokens.advantage_T * ratio_T
    bounded_T = -tokens.advantage_T * ratio_T.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(plain_T, bounded_T), bounded_T > plain_T


def clipped_weight(tokens: Tokens, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (MiniMax 2025): -sg(clip(r)) * A * logp, clip to [1 - low, 1 + high]; no token loses its gradient."""
    ratio_T = (tokens.logp_T - tokens.logp_old_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    return -bounded_T * tokens.advantage_T * tokens.logp_T, ratio_T != bounded_T


@dataclass(frozen=True)
class Scale:
    """How an aggregation weighs a batch: the sum over sequences of `sum of terms / per_sequence`, over `total`."""

    per_sequence_S: torch.Tensor
    total: float


Aggregation = Callable[[torch.Tensor, int], Scale]
"""(kept tokens of each sequence of the whole batch [S], longest answer L_max) -> Scale."""


def sequence_mean(lengths_S: torch.Tensor, longest: int) -> Scale:
    """Mean over sequences of the mean over their tokens (GRPO)."""
    return Scale(lengths_S.clamp(min=1), max(1, int((lengths_S > 0).sum())))


def token_mean(lengths_S: torch.Tensor, longest: int) -> Scale:
    """Sum over all tokens, over the number of tokens of the whole batch (DAPO)."""
    return Scale(torch.ones_like(lengths_S), max(1, int(lengths_S.sum())))


def fixed_length(lengths_S: torch.Tensor, longest: int) -> Scale:
    """Sum over all tokens, over sequences * L_max (Dr. GRPO): no length decides how much a token weighs."""
    return Scale(torch.ones_like(lengths_S), max(1, int((lengths_S > 0).sum())) * longest)


@dataclass(frozen=True)
class Loss:
    token_loss: TokenLoss
    aggregation: Aggregation


LOSSES: dict[str, Loss] = {
    "grpo": Loss(clipped_ratio, sequence_mean),
    "dapo": Loss(clipped_ratio, token_mean),
    "dr_grpo": Loss(clipped_ratio, fixed_length),
    "gspo": Loss(sequence_ratio, sequence_mean),
    "cispo": Loss(clipped_weight, token_mean),
}


def k3(logp_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) per token, estimator k3 = e^d - d - 1 with d = reference - logp (Schulman 2020).

    d is clamped to plus and minus 20, the value to 10, as verl does."""
    d_T = (reference_T - logp_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (d_T.exp() - d_T - 1).clamp(max=10.0)


def summed(terms_T: torch.Tensor, tokens: Tokens, per_sequence_S: torch.Tensor) -> torch.Tensor:
    """Scalar: the weighted sum of a micro-batch, to be divided by `Scale.total` of the whole batch.

    per_sequence_S: `Scale.per_sequence_S` of the sequences of this micro-batch.
    """
    return (tokens.sum(terms_T) / per_sequence_S).sum()
