"""Attention of a head's training: to the keys before a row in its document, and to the row's own of later steps.

Two ways to compute the same: `dense` by masked products, anywhere and in any precision; `flash` by PyTorch's kernels
for sequences of different lengths, on GPUs in bfloat16.
"""

import torch

from tasks.drafter.attention.base import Attention
from tasks.drafter.attention.dense import Dense
from tasks.drafter.attention.flash import Flash

__all__ = ["Attention", "Dense", "Flash", "fits"]


def fits(device: str, dtype: str) -> type[Attention]:
    """The faster way for products in `dtype` there."""
    return Flash if device == "cuda" and dtype == "bfloat16" and torch.backends.cuda.flash_sdp_enabled() else Dense
