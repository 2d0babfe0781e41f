"""Acceptance as the engine would count it, from proposals computed beside it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Walk:
    """drafts: proposals verified; accepted: how many of them had their i-th token accepted, by position."""

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Acceptance length: tokens emitted per target pass, the bonus token included; 1 without any draft."""
        return 1 + sum(self.accepted) / max(1, self.drafts)

    def __add__(self, other: "Walk") -> "Walk":
        longest = max(len(self.accepted), len(other.accepted))
        padded = [w.accepted + [0] * (longest - len(w.accepted)) for w in (self, other)]
        return Walk(self.drafts + other.drafts, [a + b for a, b in zip(*padded, strict=True)])


def walk(proposals: "torch.Tensor", next_ids: "torch.Tensor", first_row: int) -> Walk:
    """Walk one sequence as speculative decoding does.

    proposals: [k, rows] target ids; the i-th token proposed at row p, given that the earlier ones were right.
    next_ids: [rows]; the token that row p should propose first. first_row: the row of the answer's first token.

    A block starts at a row, its tokens are accepted up to the first wrong one, and the next starts behind the bonus
    token. Blocks that reach past the last row are not counted: what they should have proposed is unknown.
    """
    import torch

    num_tokens, num_rows = proposals.shape
    blocks = max(0, num_rows - num_tokens + 1)
    right = torch.stack([proposals[i, :blocks] == next_ids[i : blocks + i] for i in range(num_tokens)])
    runs = right.long().cumprod(dim=0).sum(dim=0).tolist()
    counted = Walk(0, [0] * num_tokens)
    row = first_row
    while row < len(runs):
        counted.drafts += 1
        for i in range(runs[row]):
            counted.accepted[i] += 1
        row += runs[row] + 1
    return counted
