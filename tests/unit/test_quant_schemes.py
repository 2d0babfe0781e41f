import json

import pytest

from infra.config.quant import QuantizeConfig
from infra.store.models import resolve
from tasks.quant import compressor
from tasks.quant.data_free import quantize
from tasks.quant.quantizers import quantizer
from tasks.quant.schemes import SCHEMES, Device, SchemeError, check, local_device, quantized_linears
from tasks.quant.size import served_bytes

ANY_CPU = Device(None, frozenset({"avx2"}))
H200 = Device(90, frozenset())


@pytest.fixture(scope="module", params=["random:llama", "random:qwen3"])
def model(request):
    return resolve(request.param)


def config(scheme="W8A8", **changes):
    return QuantizeConfig(scheme=scheme, **changes)


@pytest.fixture(scope="module")
def half(model, tmp_path_factory):
    """The model in bfloat16."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if not scheme.calibrated])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_within_half_a_step_of_its_copy(model, half, dtype, scheme, tmp_path):
    import torch
    from safetensors.torch import load_file

    source, settings = model if dtype == "float32" else half, config(scheme, group_size=32)
    quantize(source, settings, tmp_path)
    base, copy = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    names = quantized_linears(model, settings.ignore)
    for name in names:
        scale = copy[f"{name}.weight_scale"]
        assert torch.equal(
            scale, scale.to(getattr(torch, dtype)).to(scale.dtype)
        )  # the engine may hold it in this type
        levels = unpacked(copy[f"{name}.weight_packed"]) if scheme == "W4A16" else copy[f"{name}.weight"].double()
        groups = (scale.shape[1], -1)
        steps = base[f"{name}.weight"].double().unflatten(-1, groups) / scale.double()[..., None]
        levels = levels.unflatten(-1, groups)
        if scheme == "FP8_DYNAMIC":  # e4m3: three bits of mantissa, so half a step is 1/16 of the value; 448 at most
            assert torch.all((steps.clamp(-448, 448) - levels).abs() <= steps.abs() / 16 + 2**-10 + 1e-5)
        else:  # the range is -128..127 or -8..7: what lies beyond the top is clipped
            largest = 127 if scheme == "W8A8" else 7
            assert torch.all((steps.clamp(-largest - 1, largest) - levels).abs() <= 0.5 + 1e-4)
    linears = sum(base[f"{name}.weight"].numel() for name in names)
    scales = sum(copy[f"{name}.weight_scale"].numel() for name in names)
    whole = sum(weight.numel() for weight in base.values())
    assert served_bytes(source, "bfloat16") == 2 * whole  # in whatever type the checkpoint is
    shapes = sum(8 * copy[f"{name}.weight_shape"].numel() for name in names) if scheme == "W4A16" else 0
    values = linears // (2 if scheme == "W4A16" else 1)
    assert served_bytes(tmp_path, "bfloat16") == 2 * (whole - linears + scales) + values + shapes
    untouched = set(base) - {f"{name}.weight" for name in names}
    assert untouched and all(torch.equal(base[name], copy[name]) for name in untouched)


def unpacked(packed):
    import torch

    values = torch.stack([(packed.to(torch.int64) >> (4 * i)) & 0xF for i in range(8)], -1).flatten(-2)
    return (values - 8).double()


def test_the_copy_is_a_model_folder_that_names_its_scheme(model, tmp_path):
    quantize(model, config(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors" and described["format"] == "int-quantized"
    assert described["ignore"] == ["lm_head"]
    assert (tmp_path / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert (tmp_path / "chat_template.jinja").exists()


def test_hardware_that_cannot_load_a_scheme_is_named_before_work(model):
    with pytest.raises(SchemeError, match="W4A16 needs a CPU with avx512f or a GPU"):
        check(config("W4A16"), model, ANY_CPU, "bfloat16")
    with pytest.raises(SchemeError, match="needs CUDA compute capability 7.5, this GPU has 7.0"):
        check(config("W8A8"), model, Device(70, frozenset()), "bfloat16")
    assert check(config("W8A8"), model, ANY_CPU, "float32").name == "W8A8"
    assert check(config("W4A16", group_size=32), model, H200, "bfloat16").grouped


def test_types_without_kernels_are_named_before_work(model):
    with pytest.raises(
        SchemeError, match="W4A16 has no kernels here for engine.dtype=float32: use bfloat16 or float16"
    ):
        check(config("W4A16"), model, Device(None, frozenset({"avx512f"})), "float32")
    with pytest.raises(SchemeError, match="W8A8 has no kernels here for engine.dtype=float32"):
        check(config("W8A8"), model, H200, "float32")


def test_a_group_size_that_does_not_divide_is_refused_with_one_that_does(model):
    with pytest.raises(SchemeError, match=r"group_size=48 does not divide the 128 inputs of .*: use 32"):
        check(config("W4A16", group_size=48), model, H200, "bfloat16")
    with pytest.raises(SchemeError, match=r"group_size=16 has no kernels on GPUs, \(128, 64, 32\) have: use 32"):
        check(config("W4A16", group_size=16), model, H200, "bfloat16")
    assert check(config("W4A16", group_size=16), model, Device(None, frozenset({"avx512f"})), "bfloat16")


def test_layers_that_do_not_exist_or_are_tied_cannot_be_chosen(model):
    with pytest.raises(SchemeError, match="'lm_hed', which no linear layer"):
        check(config(ignore=["lm_hed"]), model, ANY_CPU, "float32")
    with pytest.raises(SchemeError, match="leaves no linear layer"):
        check(config(ignore=["re:.*"]), model, ANY_CPU, "float32")
    if json.loads((model / "config.json").read_text())["tie_word_embeddings"]:
        with pytest.raises(SchemeError, match="shares its weights with the embedding"):
            check(config(ignore=[]), model, ANY_CPU, "float32")
    else:
        assert "lm_head" in quantized_linears(model, [])


def test_this_machine_has_a_device():
    device = local_device()
    assert (device.capability is None) == bool(device.instructions)


def test_a_scheme_of_measured_activations_needs_a_recipe_and_a_gpu(model):
    with pytest.raises(SchemeError, match="NVFP4 needs scales of activations: set quantize.recipe=PTQ"):
        check(config("NVFP4"), model, H200, "bfloat16")
    with pytest.raises(SchemeError, match="NVFP4 needs a GPU, which this machine lacks"):
        check(config("NVFP4", recipe="PTQ"), model, ANY_CPU, "bfloat16")
    assert check(config("NVFP4", recipe="PTQ"), model, H200, "bfloat16").name == "NVFP4"


def test_a_recipe_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(SchemeError, match="recipe=GPTW is no recipe: use RTN, AWQ, GPTQ, PTQ, SmoothQuant"):
        quantizer(config(recipe="GPTW"))
    assert quantizer(config(recipe="GPTQ")) is compressor.quantize
