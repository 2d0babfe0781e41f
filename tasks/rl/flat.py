"""Tokens of many sequences as one flat list: no padding, and sums per sequence."""

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus and minus this before exp, as verl does."""


@dataclass(frozen=True)
class Flat:
    """sequence_T: int64, which sequence a token belongs to. kept_T: bool, tokens that count.
    num_sequences: sequences that the numbers of `sequence_T` run over."""

    sequence_T: torch.Tensor
    kept_T: torch.Tensor
    num_sequences: int

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Sum over the kept tokens of each sequence [num_sequences]."""
        zeros_S = torch.zeros(self.num_sequences, dtype=values_T.dtype, device=values_T.device)
        return zeros_S.index_add(0, self.sequence_T, torch.where(self.kept_T, values_T, 0))

    def lengths(self, dtype: torch.dtype) -> torch.Tensor:
        """Kept tokens of each sequence [num_sequences]."""
        return self.sum(torch.ones(len(self.sequence_T), dtype=dtype, device=self.sequence_T.device))
