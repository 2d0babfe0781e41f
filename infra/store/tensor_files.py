"""Heads of files in the format of safetensors."""

import json
from collections.abc import Sequence
from typing import Any, Protocol


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def header(tensors: dict[str, tuple[str, Sequence[int], int]]) -> bytes:
    """The head of a safetensors file; the bytes of its tensors follow, in this order.

    tensors: by name their dtype, as safetensors calls it, shape and size in bytes.
    """
    entries, offset = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: Readable) -> dict[str, dict[str, Any]]:
    """`dtype`, `shape` and `data_offsets` of each tensor by name; `file` then stands where the first one begins.

    Raises ValueError when this is no safetensors file.
    """
    entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    entries.pop("__metadata__", None)
    return entries
