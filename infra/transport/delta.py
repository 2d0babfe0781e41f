"""What changed between two versions of a piece of flat weights, lossless and small.

Values are compared as integers of their bits. Kept are the gaps between those that changed and how far each moved, as
integers modulo 2^bits: both are small numbers after a small step. Their bytes are stored by significance, lowest first,
and compressed with zstd.
"""

import numpy as np
import pyarrow as pa
import torch

_LEVEL = 1  # of zstd: higher ones gain a few per cent and cost several times the time
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(old: torch.Tensor, new: torch.Tensor, width: int) -> tuple[dict[str, torch.Tensor], int]:
    """Compressed tensors that `apply` takes, and the number of values that changed.

    old, new: uint8 [bytes] on the host, as many bytes in both. width: bytes of a value.
    """
    before, after = _values(old, width), _values(new, width)
    places = np.flatnonzero(before != after)
    moved = after[places] - before[places]  # wraps
    gaps = np.diff(places, prepend=-1).astype(np.uint32)
    # Zigzag: a small step down is as small a number as a step up.
    signed = moved.view(np.dtype(f"i{width}"))
    zigzag = ((signed << 1) ^ (signed >> (8 * width - 1))).view(moved.dtype)
    return {"gaps": _pack(gaps), "moves": _pack(zigzag)}, len(places)


def apply(target: torch.Tensor, tensors: dict[str, torch.Tensor], width: int) -> None:
    """Turn the old bytes in `target` into the new ones, in place. `tensors` as `encode` made them."""
    values = _values(target, width)
    gaps = _unpack(tensors["gaps"], 4)
    zigzag = _unpack(tensors["moves"], width)
    places = np.cumsum(gaps, dtype=np.int64) - 1
    one = zigzag.dtype.type(1)
    moved = (zigzag >> one) ^ (~(zigzag & one) + one)
    values[places] += moved


def _values(flat: torch.Tensor, width: int) -> np.ndarray:
    return flat.numpy().view(_WIDTHS[width])


def _pack(values: np.ndarray) -> torch.Tensor:
    """uint8 [8 + compressed bytes]: the number of values, then their bytes by significance."""
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(len(values), values.itemsize).T)
    packed = pa.Codec("zstd", compression_level=_LEVEL).compress(planes, asbytes=True) if len(values) else b""
    return torch.frombuffer(bytearray(len(values).to_bytes(8, "little") + packed), dtype=torch.uint8)


def _unpack(packed: torch.Tensor, width: int) -> np.ndarray:
    raw = packed.numpy()
    count = int.from_bytes(raw[:8].tobytes(), "little")
    if not count:
        return np.empty(0, _WIDTHS[width])
    planes = pa.Codec("zstd").decompress(pa.py_buffer(raw[8:]), count * width)
    bytes_ = np.frombuffer(planes, np.uint8).reshape(width, count).T
    return np.ascontiguousarray(bytes_).reshape(-1).view(_WIDTHS[width])
