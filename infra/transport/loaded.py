"""Whether an engine holds the weights that lineage names: asked inside its workers, after loading, before it answers.

Two links: what is in memory is what the files say, and the files are, by digest, what was committed. Memory is read
where it can be: plain linear layers (packed ones through their kernel, as after a weight update), embeddings, heads and
norms. Quantized layers are held as their kernels want them, some drafters under other names than in their files, and
some models in layers that nobody here knows: there the digest of the files, taken once they are loaded, has to do.
"""

import json
import logging
import os
from pathlib import Path

import torch
from torch import nn

from infra.engine.errors import EngineError
from infra.engine.flags import PINNED_VARIABLE
from infra.store.manifest import digest_of, files_of, hash_files
from infra.transport import packed
from infra.transport.base import SyncError
from infra.transport.layout import Destination, destinations

_logger = logging.getLogger("vllm.lockstep")


def check_when_loaded() -> None:
    """From now on no worker of this process ends `load_model` with other weights than the spec names."""
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model

    def load_and_check(self, *args, **kwargs) -> None:
        load(self, *args, **kwargs)
        drafter = self.get_draft_model()
        if self.parallel_config.world_size == 1:  # else each worker holds a part of every matrix
            check_memory(self.get_model(), Path(self.model_config.model))
            if drafter is not None:
                check_memory(drafter, Path(self.speculative_config.model), of=self.get_model())
        if self.rank == 0:
            for folder, digest in json.loads(os.environ[PINNED_VARIABLE]).items():
                check_files(Path(folder), digest)

    Worker.load_model = load_and_check


def check_files(folder: Path, digest: str) -> None:
    """Raises EngineError unless every byte in `folder` is what the artifact of this digest was committed with."""
    held = digest_of(hash_files(folder, files_of(folder)))
    if held != digest:
        raise EngineError(
            f"{folder} holds {held}, and {digest} is to be served: its files were changed after they were committed"
        )
    _logger.info("the files in %s are %s", folder, digest)


def check_memory(model: nn.Module, folder: Path, of: nn.Module | None = None) -> int:
    """Compare what `model` computes with, as far as it can be read, with the safetensors files in `folder`; the number
    of parameters compared.

    of: the target whose layers a drafter shares; they are not the drafter's. Raises EngineError naming the parameter.
    """
    files, compared = _Tensors(folder), 0
    try:
        found = destinations(model, of, quantized=True)
    except SyncError as unknown:  # a kind of layer that weight updates do not know either
        _logger.warning("what %s became in memory cannot be read, its files have to do: %s", folder, unknown)
        return 0
    for destination in found:
        names = [destination.source or piece.name for piece in destination.pieces]
        if all(name in files.files for name in names):
            if not _same(destination, [files.read(name).to(destination.dtype) for name in names]):
                raise EngineError(f"{names[0]} is not in the engine's memory as {folder} has it: start the engine anew")
            compared += len(names)
    _logger.info("%d of the parameters in %s were found in memory as they are there", compared, folder)
    return compared


def _same(destination: Destination, values: list[torch.Tensor]) -> bool:
    held = destination.parameter
    if not destination.kernel:
        pairs = zip(destination.pieces, values, strict=True)
        return all(torch.equal(held[p.start : p.stop].view_as(v), v.to(held.device)) for p, v in pairs)
    matrix = torch.zeros(destination.shape, dtype=destination.dtype)  # rows that pad a vocabulary stay 0
    for piece, rows in zip(destination.pieces, values, strict=True):
        matrix[piece.start : piece.stop] = rows
    try:
        packed.check_packing(destination.module.cpu_linear, matrix, destination.pieces[0].name, 0)
    except SyncError:
        return False
    return True


class _Tensors:
    """Tensors of the safetensors files in a folder, by name."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        opened = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self.files = {name: file for file in opened for name in [*file.keys()]}

    def read(self, name: str) -> torch.Tensor:
        return self.files[name].get_tensor(name)
