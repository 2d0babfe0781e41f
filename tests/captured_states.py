"""Captured sequences without an engine: files such as a capture engine leaves, for a writer."""

import itertools
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.drafter.states import Captured
from tasks.drafter.states_writer import StatesWriter

_folder = tempfile.TemporaryDirectory(prefix="engine-files-")
_numbers = itertools.count()


def engine_file(one: Captured) -> Path:
    path = Path(_folder.name, f"{next(_numbers)}.safetensors")
    tensors = {"hidden_states": one.states.contiguous(), "token_ids": torch.tensor(one.sequence.token_ids)}
    save_file(tensors, path)
    path.with_name(f"{path.name}.lock").touch()
    return path


def add(writer: StatesWriter, one: Captured) -> Path:
    """Give `one` to the writer, in a file of its own, which is returned."""
    path = engine_file(one)
    writer.add(one.sequence, path, one.states.nbytes)
    return path
