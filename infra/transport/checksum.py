"""A checksum of tensors that is fast on CPU and GPU and does not mind transposed memory.

The bits of the values, as integers w[i, j], are summed over each row and over each column modulo 2^32. Row sums and
column sums are each weighted by pseudo-random odd numbers of their index and summed modulo 2^32; the two results are
the checksum. Any change of one value, row, column, or of their order changes it.

Zeros of either sign and, for float32 and bfloat16, numbers below the normal range count as +0: matrix kernels return
them as such.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

_MASK = 0xFFFFFFFF
_ROWS, _COLUMNS = 0x2545F491, 0x9E3779B9  # seeds of the weights
_BLOCK_VALUES = 32_000
"""Values are taken in blocks that stay in a core's cache and that torch does not spread over threads: on a busy machine
a thread that has to wait for its turn holds up all the others, thousands of times."""
_GPU_BLOCK_VALUES = 2**26
"""A GPU takes large blocks: its integers beside the values of one are 384 MiB at most."""

_STACK_VALUES = 2**24
"""Of matrices that are summed together: a GPU has enough to do with so many between two things it is told."""


class Margins:
    """Row and column sums of a matrix [rows, columns], added in parts."""

    def __init__(self, rows: int, columns: int, device: torch.device | str = "cpu") -> None:
        self.rows = torch.zeros(rows, dtype=torch.int32, device=device)
        self.columns = torch.zeros(columns, dtype=torch.int32, device=device)

    def add(self, part: torch.Tensor, row: int = 0, column: int = 0) -> None:
        """Add `part` [r, c], a matrix of any strides whose first value is w[row, column]."""
        bits = _bits(part)
        self.rows[row : row + part.shape[0]] += bits.sum(1, dtype=torch.int32)
        self.columns[column : column + part.shape[1]] += bits.sum(0, dtype=torch.int32)

    def sums(self) -> torch.Tensor:
        """The checksum before it is `written`, int64 [2]."""
        return torch.stack([_weighted(self.rows, _ROWS), _weighted(self.columns, _COLUMNS)])

    def digest(self) -> str:
        """16 hexadecimal digits."""
        return digests([self])[0]


def checksum(tensor: torch.Tensor) -> str:
    """Checksum of a tensor of any shape, floating point or integer, 16 hexadecimal digits."""
    return margins_of(tensor).digest()


def margins_of(tensor: torch.Tensor) -> Margins:
    """The sums that are digested to the checksum of a tensor of any shape. On a GPU nothing waits for them."""
    matrix = as_matrix(tensor)
    margins = Margins(*matrix.shape, device=tensor.device)
    for start, block in blocks(matrix):
        margins.add(block, row=start)
    return margins


def digests(margins: Sequence[Margins]) -> list[str]:
    """16 hexadecimal digits of each, all on one device, which is waited for once."""
    return written(torch.stack([m.sums() for m in margins])) if margins else []


def sums_of(stack: torch.Tensor) -> torch.Tensor:
    """The checksums of matrices of one shape, [n, rows, columns], at once, before they are `written`: int64 [n, 2].

    As many values as `fits_stack` says: a GPU sums a small matrix in less time than it takes to tell it to.
    """
    bits = _bits(stack)
    return torch.stack(
        [_weighted(bits.sum(2, dtype=torch.int32), _ROWS), _weighted(bits.sum(1, dtype=torch.int32), _COLUMNS)], dim=1
    )


def fits_stack(values: int) -> bool:
    """Whether `sums_of` takes so many values."""
    return values <= _STACK_VALUES


def written(sums: torch.Tensor) -> list[str]:
    """16 hexadecimal digits of each pair of int64 [n, 2]. Waits for their device."""
    return [f"{rows & _MASK:08x}{columns & _MASK:08x}" for rows, columns in sums.tolist()]


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as the matrix whose margins are taken: [first dimension, product of the others]."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.ndim else tensor.reshape(1, 1)


def blocks(matrix: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    """(first row, rows) of `matrix` in blocks that fit a core's cache; larger ones on a GPU."""
    values = _BLOCK_VALUES if matrix.device.type == "cpu" else _GPU_BLOCK_VALUES
    rows = max(1, values // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], rows):
        yield start, matrix[start : start + rows]


def _bits(values: torch.Tensor) -> torch.Tensor:
    if not values.is_floating_point():
        wide = values.to(torch.int64)
        return (wide ^ (wide >> 32)).to(torch.int32)
    flush = 0.0 if values.dtype == torch.float16 else torch.finfo(values.dtype).tiny
    # hardshrink gives +0 for everything in [-flush, flush] and keeps the rest, NaN included; float32's smallest normal
    # number itself is in the interval, which costs nothing.
    flushed = torch.nn.functional.hardshrink(values, flush)
    if values.element_size() == 4:
        return flushed.view(torch.int32)
    return flushed.view(torch.int16).to(torch.int32)


def _weighted(sums: torch.Tensor, seed: int) -> torch.Tensor:
    # Only the low 32 bits are wanted: the signed product and sum may wrap.
    return (sums.to(torch.int64) * _odd(sums.shape[-1], seed, sums.device)).sum(-1)


@lru_cache(maxsize=64)  # a model has few different sizes
def _odd(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Pseudo-random odd numbers of 32 bits, int64 [count]."""
    index = torch.arange(count, dtype=torch.int64, device=device)
    mixed = ((index + seed) * 0x9E3779B1) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK
    odd = (mixed ^ (mixed >> 16)) | 1
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other threads use it on streams of their own
    return odd
