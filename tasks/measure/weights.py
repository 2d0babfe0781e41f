"""Weights to move: a model's names and shapes, with values that change."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WIDTHS = (256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096)
VOCABULARY = 49_152
_STEP = 2**-7  # of a value's size: the last bit of a bfloat16


class Weights:
    """Random values under the names and shapes of the model in a folder, a tied head left out as trainers do.

    tensors: by Hugging Face name, of type `dtype`, on `device`.
    """

    def __init__(self, folder: Path, dtype: str, device: str = "cpu") -> None:
        import torch

        self.dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device).uniform_(-0.05, 0.05)
            for name, shape in _shapes(folder).items()
        }
        self.nbytes = sum(t.nbytes for t in self.tensors.values())

    def change(self, share: float = 1.0) -> None:
        """Another version: this share of the values, chosen at random, moves a little."""
        import torch

        for tensor in self.tensors.values():
            step = _STEP if share == 1 else _STEP * torch.empty_like(tensor).bernoulli_(share)
            tensor.mul_(1 + step)


def size_of(folder: Path, dtype: str) -> int:
    """Bytes of those weights, without making them."""
    import torch

    return sum(shape.numel() for shape in _shapes(folder).values()) * getattr(torch, dtype).itemsize


def random_model(billions: float, dtype: str, parent: Path) -> Path:
    """A Llama's configuration of about that many billion parameters, without weights, in a new folder below `parent`.

    An engine fills it itself (`--load-format=dummy`).
    """
    from transformers import LlamaConfig

    from infra.store.models import resolve

    width, layers = min(
        ((width, max(1, round((billions * 1e9 - width * VOCABULARY) / _per_layer(width)))) for width in WIDTHS),
        key=lambda shape: abs(shape[1] - shape[0] / 85) + abs(_size(*shape) - billions * 1e9) / 1e7,
    )
    folder = parent / f"random-{billions:g}b"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((resolve("random:llama") / name).read_bytes())
    return folder


def _shapes(folder: Path) -> dict[str, "torch.Size"]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: p.shape for name, p in model.named_parameters()}


def _per_layer(width: int) -> int:
    return int(2.5 * width * width + 9 * width * width)  # q, o and a quarter each of k, v; three of the feed-forward


def _size(width: int, layers: int) -> int:
    return width * VOCABULARY + layers * _per_layer(width)
