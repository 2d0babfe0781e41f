"""Files of tensors, read and checked without a copy."""

import zlib

import torch

from infra.transport.shelf import Reader


def read_into(file: Reader, body: torch.Tensor) -> int:
    """Fill `body` from `file`; the number of bytes that there were."""
    memory, count = memoryview(body.numpy()), 0
    while count < len(memory) and (read := file.readinto(memory[count:])):
        count += read
    return count


def crc32(tensors: dict[str, torch.Tensor]) -> int:
    """Of their bytes, one tensor after the other."""
    found = 0
    for tensor in tensors.values():
        found = zlib.crc32(tensor.numpy(), found)
    return found
