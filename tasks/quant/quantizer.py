"""What every quantizer offers."""

from pathlib import Path
from typing import Protocol

from infra.config.quant import QuantizeConfig


class Quantizer(Protocol):
    """Writes a quantized copy of a model in a form that vLLM loads."""

    def __call__(self, model: Path, config: QuantizeConfig, folder: Path) -> None:
        """Quantize the model in folder `model` by `config` into the empty folder `folder`, tokenizer included."""


def quantizer(config: QuantizeConfig) -> Quantizer:
    """The quantizer of `config.quantizer`."""
    from tasks.quant import data_free

    return {"compressed_tensors": data_free.quantize}[config.quantizer]
