"""Quantization schemes as data, and whether a model can be quantized by one and loaded on the hardware at hand."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from infra.config.quant import ROUND_TO_NEAREST, QuantizeConfig
from infra.engine.pin import accelerated


class SchemeError(ValueError):
    """A scheme that this model or this hardware cannot use."""


class Scheme(NamedTuple):
    """name: its compressed-tensors preset. grouped: weights have a scale per group of `group_size` inputs, else per
    output channel or the scheme's own groups. min_capability: oldest CUDA compute capability, times ten, whose kernels
    run it in vLLM 0.32. cpu_needs: instruction set that its CPU kernels need, `CUDA` where there are none, None where
    any will do. cpu_dtypes: activation types of its CPU kernels. calibrated: it needs a recipe, which measures
    activations. gpu_groups: group sizes that its kernels on GPUs take, of grouped ones."""

    name: str
    grouped: bool
    min_capability: int
    cpu_needs: str | None
    cpu_dtypes: tuple[str, ...]
    calibrated: bool = False
    gpu_groups: tuple[int, ...] = ()


HALF = ("bfloat16", "float16")


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("W8A8", grouped=False, min_capability=75, cpu_needs=None, cpu_dtypes=("float32", *HALF)),
        Scheme("FP8_DYNAMIC", grouped=False, min_capability=75, cpu_needs=None, cpu_dtypes=("float32", *HALF)),
        Scheme(
            "W4A16",
            grouped=True,
            min_capability=75,
            cpu_needs="avx512f",
            cpu_dtypes=HALF,
            gpu_groups=(128, 64, 32),  # Marlin's; Machete takes two of them, and Triton's kernel a larger one
        ),
        Scheme("NVFP4", grouped=False, min_capability=75, cpu_needs="CUDA", cpu_dtypes=(), calibrated=True),
    )
}


class Device(NamedTuple):
    """Where an engine will load the quant. capability: CUDA compute capability times ten, None on CPU; instructions:
    the CPU's instruction sets."""

    capability: int | None
    instructions: frozenset[str]


def local_device() -> Device:
    """The device an engine of this machine uses: its first GPU where vLLM is installed for GPUs, else its CPU."""
    if accelerated():
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        return Device(round(10 * float(first)), frozenset())
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    return Device(None, frozenset(flags.partition(":")[2].split()))


def check(config: QuantizeConfig, model: Path, device: Device, dtype: str) -> Scheme:
    """The scheme `config` names, once `model` (a folder) can be quantized by it and an engine on `device` with
    activations of `dtype` can load the result.

    Raises SchemeError saying what does not fit and what to change.
    """
    scheme = SCHEMES[config.scheme]
    if scheme.calibrated and config.recipe == ROUND_TO_NEAREST:
        raise SchemeError(f"quantize.scheme={scheme.name} needs scales of activations: set quantize.recipe=PTQ")
    if device.capability is not None and device.capability < scheme.min_capability:
        raise SchemeError(
            f"quantize.scheme={scheme.name} needs CUDA compute capability {scheme.min_capability / 10}, this GPU has "
            f"{device.capability / 10}: choose another scheme or GPU"
        )
    if device.capability is None and scheme.cpu_needs and scheme.cpu_needs not in device.instructions:
        what = "a GPU" if scheme.cpu_needs == "CUDA" else f"a CPU with {scheme.cpu_needs} or a GPU"
        raise SchemeError(
            f"quantize.scheme={scheme.name} needs {what}, which this machine lacks: use quantize.scheme=W8A8"
        )
    dtypes = scheme.cpu_dtypes if device.capability is None else HALF
    if dtype not in dtypes:
        raise SchemeError(
            f"quantize.scheme={scheme.name} has no kernels here for engine.dtype={dtype}: use {' or '.join(dtypes)}"
        )
    linears = quantized_linears(model, config.ignore)
    if scheme.grouped:
        _check_groups(config.group_size, linears, None if device.capability is None else scheme.gpu_groups)
    return scheme


def _check_groups(size: int, linears: dict[str, int], kernels: tuple[int, ...] | None) -> None:
    """kernels: the sizes that there are kernels for, largest first; None where any will do."""
    known = kernels or range(size, 0, -1)
    fitting = [some for some in known if all(inputs % some == 0 for inputs in linears.values())]
    better = next((some for some in fitting if some <= size), min(fitting, default=None))
    cure = f"use {better}" if better else "choose another scheme"
    for name, inputs in linears.items():
        if inputs % size:
            raise SchemeError(f"quantize.group_size={size} does not divide the {inputs} inputs of {name}: {cure}")
    if kernels and size not in kernels:
        raise SchemeError(f"quantize.group_size={size} has no kernels on GPUs, {kernels} have: {cure}")


def quantized_linears(model: Path, ignore: list[str]) -> dict[str, int]:
    """Input width of every linear layer of the model in folder `model` that `ignore` leaves to be quantized, by name.

    Raises SchemeError when an entry of `ignore` matches no linear layer, when all layers are ignored, or when the
    output head is not although it shares its weights with the embedding.
    """
    import torch
    from compressed_tensors.utils.match import match_name
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    linears = {n: m.in_features for n, m in skeleton.named_modules() if isinstance(m, torch.nn.Linear)}
    for pattern in ignore:
        if not any(match_name(name, pattern) for name in linears):
            raise SchemeError(
                f"quantize.ignore names {pattern!r}, which no linear layer of {model} matches: its layers are like "
                f"{sorted(linears)[:3]}"
            )
    kept = {n: width for n, width in linears.items() if not any(match_name(n, pattern) for pattern in ignore)}
    if not kept:
        raise SchemeError(f"quantize.ignore={ignore} leaves no linear layer of {model} to quantize: shorten it")
    head = next((n for n, m in skeleton.named_modules() if m is skeleton.get_output_embeddings()), None)
    if head in kept and skeleton.config.tie_word_embeddings:
        raise SchemeError(f"{head} of {model} shares its weights with the embedding: add it to quantize.ignore")
    return kept
