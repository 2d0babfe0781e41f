"""Linear layers of vLLM's CPU build: matrices packed into memory that only their kernel can read."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from infra.engine.quirks import KERNELS
from infra.transport.checksum import Margins
from infra.transport.layout import Piece

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [.., K], weight, bias) -> [.., N], as `layer.cpu_linear`; packed ones ignore `weight`."""

_OUTPUT_BYTES = 1 << 21
"""The identity is pushed through a kernel in blocks of rows whose output stays in the cache,"""
_MIN_ROWS = 128
"""but of no fewer than a kernel needs to reach its speed."""


def pack(weight: torch.Tensor) -> Kernel:
    """vLLM's own choice of kernel for a matrix [N, K]. The kernel holds a copy, unless `is_packed` says otherwise."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False), bias=None)
    with KERNELS:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer.cpu_linear


def is_packed(kernel: Kernel) -> bool:
    """Whether `kernel` computes with memory of its own; a fallback computes with the weight it is passed."""
    return bool(getattr(kernel, "__closure__", None))


def read_back(
    kernel: Kernel, weight: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, pieces: list[Piece]
) -> dict[str, str]:
    """Checksums by name of the row ranges `pieces` of the matrix [N, K] that `kernel` multiplies by.

    The identity is pushed through it: in floating point, sums of one product with 1 and products with 0 are exact.
    weight: what the layer passes to the kernel beside the input.
    """
    columns = shape[1]
    margins = [Margins(piece.stop - piece.start, columns) for piece in pieces]
    step = max(_MIN_ROWS, _OUTPUT_BYTES // (shape[0] * dtype.itemsize))
    identity = torch.eye(min(step, columns), dtype=dtype)
    for start in range(0, columns, step):
        rows = min(step, columns - start)
        x = torch.zeros(rows, columns, dtype=dtype)
        x[:, start : start + rows] = identity[:rows, :rows]
        with KERNELS:
            block = kernel(x, weight, None)  # [rows of the identity, N]: columns [start, start + rows) of the matrix
        for piece, sums in zip(pieces, margins, strict=True):
            sums.add(block[:, piece.start : piece.stop].t(), column=start)
    return {piece.name: sums.digest() for piece, sums in zip(pieces, margins, strict=True)}
