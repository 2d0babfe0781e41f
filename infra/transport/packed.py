"""Linear layers of vLLM's CPU build: matrices packed into memory that only their kernel can read."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from infra.engine.quirks import KERNELS
from infra.transport.base import SyncError
from infra.transport.checksum import Margins
from infra.transport.layout import Piece

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [.., K], weight, bias) -> [.., N], as `layer.cpu_linear`; packed ones ignore `weight`."""

_STRIPE = 48
"""Columns of a packed matrix that are read back exactly with each version; the next version's are the next ones."""
_PROBES = 16
"""Random inputs whose products touch every value of a packed matrix with each version."""
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


def _flushed(values: torch.Tensor) -> torch.Tensor:
    """Without numbers below the normal range, which kernels return as zeros."""
    flush = 0.0 if values.dtype == torch.float16 else torch.finfo(values.dtype).tiny
    return torch.nn.functional.hardshrink(values, flush)


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


def check_packing(kernel: Kernel, matrix: torch.Tensor, name: str, version: int) -> None:
    """Make sure that `kernel` multiplies by `matrix` [N, K], whose values are known to be right.

    A stripe of columns, another one with each `version`, must come back bit for bit, and products with random signs
    must agree within the largest error that sums of K products can have: every value is touched now, and read exactly
    within K / _STRIPE versions. Reading all of it each time (`read_back`) would take as long as 2 K^2 N operations.
    Raises SyncError naming the parameter.
    """
    columns = matrix.shape[1]
    width = min(_STRIPE, columns)
    start = min(version * width % columns, columns - width)
    x = torch.zeros(width + _PROBES, columns, dtype=matrix.dtype)
    x[torch.arange(width), torch.arange(start, start + width)] = 1
    signs = torch.Generator().manual_seed(version)
    x[width:] = torch.randint(0, 2, (_PROBES, columns), generator=signs, dtype=matrix.dtype) * 2 - 1
    with KERNELS:
        found = kernel(x, matrix, None)  # [width + _PROBES, N]
    stripe = matrix[:, start : start + width].t().contiguous()
    same = torch.equal(found[:width], stripe) or torch.equal(_flushed(found[:width]), _flushed(stripe))
    wide = matrix.float()
    wanted = x[width:].float() @ wide.t()
    # the largest error of a sum in any order, once for each of the two
    bound = 2 * columns * torch.finfo(torch.float32).eps * torch.linalg.vector_norm(wide, ord=1, dim=1)
    if matrix.dtype != torch.float32:
        bound = bound + wanted.abs() * torch.finfo(matrix.dtype).eps  # the product is rounded to the kernel's type
    if not same or not bool(((found[width:].float() - wanted).abs() <= bound).all()):
        raise SyncError(f"{name}: the kernel that was packed for it does not multiply by the values that arrived")
