"""Corrections for the mismatch between the engine that sampled and the trainer that learns.

With D = logp_old - logp_rollout and rho = exp(D), each correction gives every sampled token a weight that multiplies
its loss, and says which tokens take part in the loss at all. Neither carries a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tasks.rl.flat import MAX_LOG_RATIO, Flat


@dataclass(frozen=True)
class Mismatch(Flat):
    """log_ratio_T: D per token, nats."""

    log_ratio_T: torch.Tensor

    def rho(self) -> torch.Tensor:
        """exp(D) per token [T]."""
        return self.log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


Correction = Callable[[Mismatch, float, float], tuple[torch.Tensor, torch.Tensor]]
"""(mismatch, low, high) -> weight per token [T], and bool [T]: tokens that stay in the loss and in its denominator."""


def none(mismatch: Mismatch, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight 1."""
    return torch.ones_like(mismatch.log_ratio_T), mismatch.kept_T


def tis(mismatch: Mismatch, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance sampling per token: min(rho, high) (Yao et al. 2025)."""
    return mismatch.rho().clamp(max=high), mismatch.kept_T


def tis_sequence(mismatch: Mismatch, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance sampling per sequence: min(exp(sum of D), high) on each of its tokens."""
    total_S = mismatch.sum(mismatch.log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return total_S.exp().clamp(max=high)[mismatch.sequence_T], mismatch.kept_T


def icepop(mismatch: Mismatch, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """rho where low <= rho <= high, else 0 (IcePop, token-level MIS). Zeroed tokens still count in the denominator."""
    rho_T = mismatch.rho()
    return torch.where((rho_T >= low) & (rho_T <= high), rho_T, 0), mismatch.kept_T


def mis_sequence(mismatch: Mismatch, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences with low <= exp(mean of D) <= high keep their untruncated rho per token; the others leave the loss."""
    clamped_T = mismatch.log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mean_S = (mismatch.sum(clamped_T) / mismatch.lengths(clamped_T.dtype).clamp(min=1)).exp()
    return mismatch.rho(), mismatch.kept_T & ((mean_S >= low) & (mean_S <= high))[mismatch.sequence_T]


CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "tis": tis,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "mis_sequence": mis_sequence,
}
