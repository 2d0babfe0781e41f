"""Which part of which parameter of vLLM's model each Hugging Face parameter is.

vLLM joins projections that read the same input (`packed_modules_mapping`: q, k, v into `qkv_proj`), pads vocabularies,
and on CPU packs the matrices of linear layers into memory that only their kernel can read.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from infra.transport.base import SyncError


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of an engine parameter, known to trainers as `name`."""

    name: str
    start: int
    stop: int


@dataclass
class Destination:
    """One parameter, or saved buffer, of the engine's model.

    module, attribute: the parameter is `module.attribute`.
    shape, dtype: in checkpoint format (a packed matrix is gone from the module).
    pieces: its Hugging Face parameters, in order of rows.
    source: the published parameter to take instead when the only piece is tied to it and not published itself.
    kernel: what is computed with is not the parameter but `module.cpu_linear`, a kernel on packed memory.
    """

    module: nn.Module
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    source: str | None = None
    kernel: bool = False

    @property
    def parameter(self) -> torch.Tensor:
        return getattr(self.module, self.attribute)


def destinations(model: nn.Module, target: nn.Module | None = None, *, quantized: bool = False) -> list[Destination]:
    """Every parameter and every saved buffer of a vLLM model, tied heads apart from their embedding.

    target: of a drafter, whose modules may be the target's own; they are left out. Buffers whose name begins with an
    underscore are the engine's own, such as scales of its cache.
    quantized: layers that are quantized are left out.

    Raises SyncError when a layer is quantized, unless those are left out, or holds its weights in a way that is not
    known here.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found: list[Destination] = []
    first: dict[int, str] = {}
    heads = _heads(model)
    foreign = {id(module) for module in target.modules()} if target is not None else set()
    for path, module in model.named_modules(remove_duplicate=False):
        held = module._parameters | _saved_buffers(module)
        if not held or id(module) in foreign:
            continue
        if _is_quantized(module):
            if quantized:
                continue
            raise SyncError(
                f"{path} is held as {type(module.quant_method).__name__}: weights are synced into plain linear layers "
                f"and embeddings only; start rollout engines from the unquantized target"
            )
        metas = get_layerwise_info(module).restore_metadata[0]
        for attribute, parameter in held.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}"
            is_head = attribute == "weight" and id(module) in heads
            # A tied parameter appears once as the embedding's, and once as the head's.
            tied_to = first.get(id(parameter))
            if tied_to is not None and not (is_head and path == heads[id(module)]):
                continue
            first.setdefault(id(parameter), name)
            meta = metas.get(attribute, parameter)
            packed = attribute == "weight" and hasattr(module, "cpu_linear") and (parameter.numel() == 0 or is_head)
            found.append(
                Destination(
                    module=module,
                    attribute=attribute,
                    shape=tuple(meta.shape),
                    # vLLM keeps no metadata of biases, and some kernels hold them in float32.
                    dtype=meta.dtype if attribute in metas else getattr(module, "params_dtype", parameter.dtype),
                    pieces=_pieces(model, module, path, attribute, meta.shape),
                    source=tied_to,
                    kernel=packed and (tied_to is not None or path == heads.get(id(module), path)),
                )
            )
    return found


def _saved_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    unsaved = module._non_persistent_buffers_set
    return {n: b for n, b in module._buffers.items() if n not in unsaved and not n.startswith("_")}


def _heads(model: nn.Module) -> dict[int, str]:
    """Modules whose matrix turns hidden states into logits: id to the path under which they do."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    heads = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelLMHead) or path.rpartition(".")[2] == "lm_head":
            heads[id(module)] = path
    return heads


def _pieces(model: nn.Module, module: nn.Module, path: str, attribute: str, shape: torch.Size) -> list[Piece]:
    parent, _, leaf = path.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf)
    if parts is None:
        rows = getattr(module, "org_vocab_size", shape[0] if len(shape) else 1)
        return [Piece(f"{path}.{attribute}", 0, rows)]
    sizes = getattr(module, "output_partition_sizes", None)
    if sizes is None or len(sizes) != len(parts):
        raise SyncError(
            f"{path} joins {parts}, but does not say how many rows each has: {type(module).__name__} is not known"
        )
    pieces, start = [], 0
    for part, size in zip(parts, sizes, strict=True):
        pieces.append(Piece(f"{parent}.{part}.{attribute}", start, start + size))
        start += size
    return pieces


def _is_quantized(module: nn.Module) -> bool:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    method = getattr(module, "quant_method", None)
    return isinstance(method, QuantizeMethodBase) and not isinstance(method, plain)
