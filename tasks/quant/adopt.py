"""A quantized copy that was made elsewhere: whether it is one, and of this target."""

import json
from pathlib import Path

from infra.store.models import check as check_model
from tasks.quant.schemes import SchemeError

SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def check(copy: Path, target: Path) -> str:
    """The scheme of the quantized copy of `target` in the folder `copy`, as its configuration names it.

    Raises ModelError when it is no model, SchemeError when it is not quantized or not a copy of that target.
    """
    check_model(copy)
    config, base = _config(copy), _config(target)
    quantization = config.get("quantization_config")
    if not quantization:
        raise SchemeError(
            f"{copy} is not quantized: its config.json has no quantization_config; register it as a target"
        )
    text, base_text = config.get("text_config", config), base.get("text_config", base)
    for size in SIZES:
        if text.get(size) != base_text.get(size):
            raise SchemeError(
                f"{copy} is no copy of that target: its {size} is {text.get(size)}, not {base_text[size]}"
            )
    return quantization.get("format") or quantization.get("quant_method", "unknown")


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
