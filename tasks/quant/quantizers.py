"""What makes a quantized copy: one function a way, all called alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from infra.config.quant import ROUND_TO_NEAREST, QuantizeConfig
from tasks.quant import compressor, data_free


class Quantizer(Protocol):
    """Writes the model in folder `model`, quantized by `config`, into `folder`, which vLLM then loads.

    texts: token ids of what the model is asked, for those that calibrate.
    """

    def __call__(self, model: Path, config: QuantizeConfig, texts: Sequence[Sequence[int]], folder: Path) -> None: ...


def quantizer(config: QuantizeConfig) -> Quantizer:
    """The quantizer that `config.recipe` names. Raises SchemeError when it names none."""
    if config.recipe == ROUND_TO_NEAREST:
        return lambda model, config, _texts, folder: data_free.quantize(model, config, folder)
    compressor.recipe_of(config)
    return compressor.quantize
