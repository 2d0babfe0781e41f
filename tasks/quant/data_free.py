"""Round-to-nearest quantization by compressed-tensors: scales from the weights alone, no calibration data."""

import shutil
from pathlib import Path

from infra.config.quant import QuantizeConfig
from tasks.quant.schemes import SCHEMES


def quantize(model: Path, config: QuantizeConfig, folder: Path) -> None:
    """Write the model in folder `model`, quantized by `config`, into `folder` in compressed-tensors format.

    A scale is max |w| over its channel (a row of the weight) or group (`group_size` inputs of a row), divided by half
    the range of the quantized type. It is rounded to the checkpoint's type first, then the weights are rounded with it
    in float32, so that the engine dequantizes with the scale that the rounding used. The engine quantizes activations.
    """
    from compressed_tensors.compressors import ModelCompressor, compress_module
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from transformers import AutoModelForCausalLM

    scheme = preset_name_to_scheme(config.scheme, ["Linear"])
    if SCHEMES[config.scheme].grouped:
        scheme.weights.group_size = config.group_size
    network = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    apply_quantization_config(network, QuantizationConfig(config_groups={"group_0": scheme}, ignore=config.ignore))
    for module in network.modules():
        if hasattr(module, "quantization_scheme"):
            _set_scale(module, scheme.weights)
            compress_module(module)
    compressor = ModelCompressor.from_pretrained_model(network)
    compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
    network.save_pretrained(folder)
    compressor.update_config(str(folder))
    for file in model.iterdir():
        if file.is_file() and not (folder / file.name).exists() and not _holds_weights(file):
            shutil.copy2(file, folder / file.name)


def _set_scale(module, args) -> None:
    """Make `module.weight` float32, [out, in], and set `module.weight_scale`, [out, 1] or [out, in / group_size]."""
    import torch
    from compressed_tensors.quantization.utils import calculate_qparams

    dtype = module.weight.dtype
    weight = module.weight.detach().float()
    groups = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.weight_scale = torch.nn.Parameter(scale.to(dtype).float(), requires_grad=False)


def _holds_weights(file: Path) -> bool:
    return file.suffix in {".safetensors", ".bin", ".pt", ".gguf"} or file.name.endswith(".safetensors.index.json")
