"""An engine serves the weights that lineage names, or does not start."""

import shutil
from pathlib import Path

import pytest

from infra.config.quant import QuantizeConfig
from infra.engine.errors import EngineError
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role, Speculation
from infra.store.manifest import digest_of, files_of, hash_files
from tasks.quant.data_free import quantize


def digest(folder: Path) -> str:
    """As an artifact's manifest names it."""
    return digest_of(hash_files(folder, files_of(folder)))


def spec(model: Path, config, **more) -> EngineSpec:
    return EngineSpec(model=model, role=Role.serve, config=config, pinned={str(model): digest(model)}, **more)


@pytest.fixture
def copy(tiny_llama, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def test_a_target_and_a_drafter_are_found_in_memory_as_they_are_in_their_files(
    tiny_llama, tiny_engine_config, tmp_path
):
    drafter = Speculation(method="draft_model", model=tiny_llama, num_speculative_tokens=1)
    with start(spec(tiny_llama, tiny_engine_config, speculation=drafter), tmp_path) as engine:
        said = engine.log.read_text()
    found = f"of the parameters in {tiny_llama} were found in memory"
    assert said.count(f"75 {found}") == 2 and f"the files in {tiny_llama} are {digest(tiny_llama)}" in said


def test_of_a_quant_what_is_not_quantized_is_found_and_the_files_answer_for_the_rest(
    tiny_qwen3, tiny_engine_config, tmp_path
):
    quant = tmp_path / "quant"
    quant.mkdir()
    quantize(tiny_qwen3, QuantizeConfig(scheme="W8A8"), quant)
    with start(spec(quant, tiny_engine_config), tmp_path) as engine:
        said = engine.log.read_text()
    assert f"35 of the parameters in {quant} were found" in said and f"the files in {quant} are sha256:" in said


def test_files_that_changed_after_they_were_committed_are_not_served(copy, tiny_engine_config, tmp_path):
    committed = spec(copy, tiny_engine_config)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-5] ^= 1  # one bit of one weight
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(EngineError, match=f"{copy} holds {digest(copy)}, and {committed.pinned[str(copy)]} is to be"):
        start(committed, tmp_path)


@pytest.mark.parametrize("layer", ["model.layers.1.input_layernorm", "model.layers.1.mlp.down_proj"])
def test_weights_that_went_wrong_on_the_way_to_memory_are_not_served(
    tiny_llama, tiny_engine_config, tmp_path, monkeypatch, layer
):
    monkeypatch.setenv("LOCKSTEP_TEST_SPOILED_LAYER", layer)
    extension = ["--worker-extension-cls=tests.weight_plants.Spoiled"]
    spoiled = tiny_engine_config.model_copy(update={"extra_flags": extension})
    with pytest.raises(EngineError, match=rf"{layer}.weight is not in the engine's memory as {tiny_llama} has it"):
        start(spec(tiny_llama, spoiled), tmp_path)
