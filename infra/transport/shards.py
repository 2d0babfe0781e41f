"""Files in the format of safetensors, written and read without a copy."""

import json
import zlib
from collections.abc import Sequence

import torch

from infra.transport.shelf import Reader


def read_into(file: Reader, body: torch.Tensor) -> int:
    """Fill `body` from `file`; the number of bytes that there were."""
    memory, count = memoryview(body.numpy()), 0
    while count < len(memory) and (read := file.readinto(memory[count:])):
        count += read
    return count


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


def crc32(tensors: dict[str, torch.Tensor]) -> int:
    """Of their bytes, one tensor after the other."""
    found = 0
    for tensor in tensors.values():
        found = zlib.crc32(tensor.numpy(), found)
    return found
