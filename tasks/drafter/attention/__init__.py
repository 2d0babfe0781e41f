"""Attention of a head's training: to the keys before a row in its document, and to the row's own of later steps.

Two ways to compute the same: `dense` by masked products, anywhere and in any precision; `flash` by PyTorch's kernels
for sequences of different lengths, on GPUs in bfloat16.
"""

from infra.config.drafter import DrafterConfig
from tasks.drafter.attention.base import Attention
from tasks.drafter.attention.dense import Dense
from tasks.drafter.attention.flash import Flash

__all__ = ["Attention", "Dense", "Flash", "fits"]


def fits(device: str, config: DrafterConfig) -> type[Attention]:
    """The faster way to train there, unless the configuration wants masked products."""
    flash = config.attention == "auto" and device == "cuda" and config.dtype == "bfloat16"
    return Flash if flash else Dense
