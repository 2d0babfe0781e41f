"""Files of bytes by name in the format of safetensors, written and read without a copy."""

import json
import zlib

import torch

from infra.transport.shelf import Reader


def read_into(file: Reader, body: torch.Tensor) -> int:
    """Fill `body` from `file`; the number of bytes that there were."""
    memory, count = memoryview(body.numpy()), 0
    while count < len(memory) and (read := file.readinto(memory[count:])):
        count += read
    return count


def header(tensors: dict[str, torch.Tensor]) -> bytes:
    """The head of a safetensors file of these uint8 vectors; their bytes follow."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [tensor.numel()], "data_offsets": [offset, offset + tensor.numel()]}
        offset += tensor.numel()
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def crc32(tensors: dict[str, torch.Tensor]) -> int:
    """Of their bytes, one tensor after the other."""
    found = 0
    for tensor in tensors.values():
        found = zlib.crc32(tensor.numpy(), found)
    return found
