"""A recipe of llm-compressor, in its own environment, and its quant in vLLM."""

import asyncio
import json
import random

import pytest

from infra.config.quant import QuantizeConfig
from infra.engine.spec import EngineSpec, Role
from tasks.evaluate import fidelity
from tasks.evaluate.fidelity import Text
from tasks.quant import compressor
from tasks.quant.compressor import CompressorError

SEEDED = random.Random(0)
TEXTS = [[SEEDED.randrange(100, 40_000) for _ in range(48)] for _ in range(16)]
RECIPE = """
quantization_stage:
  quantization_modifiers:
    SmoothQuantModifier: {smoothing_strength: 0.5}
    GPTQModifier: {}
"""


@pytest.fixture(scope="module")
def installed():
    try:
        return compressor.environment()
    except CompressorError as error:
        pytest.skip(f"llm-compressor cannot be installed here, its packages come from PyPI: {error}")


def test_smoothquant_with_gptq_is_calibrated_and_served(installed, tiny_llama, engine, tiny_engine_config, tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    config = QuantizeConfig(scheme="W8A8", recipe=str(tmp_path / "mine.yaml"))
    folder = tmp_path / "quant"
    compressor.quantize(tiny_llama, config, TEXTS[:8], folder)

    described = json.loads((folder / "config.json").read_text())
    assert described["quantization_config"]["quant_method"] == "compressed-tensors"
    assert described["quantization_config"]["format"] == "int-quantized"
    assert described["tie_word_embeddings"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tiny_llama / name).read_bytes()

    texts = {"held out": [Text(token_ids=t, answer_start=16) for t in TEXTS[8:]]}
    base, quant = (
        asyncio.run(fidelity.score(engine(_spec(m, tiny_engine_config)).handle(), texts, top_k=256, concurrency=8))
        for m in (tiny_llama, folder)
    )
    kl = next(r for r in fidelity.rows(base, quant, subject="quant:t/1") if r["figure"] == "quant_kl")
    assert kl["n"] == 8 * 32 and 0 < kl["value"] < 0.01


def test_what_llm_compressor_says_last_is_told(installed, tiny_llama, tmp_path):
    (tmp_path / "bad.yaml").write_text("quantization_stage:\n  quantization_modifiers:\n    NoSuchModifier: {}\n")
    config = QuantizeConfig(recipe=str(tmp_path / "bad.yaml"))
    with pytest.raises(CompressorError, match="llm-compressor failed: .*NoSuchModifier"):
        compressor.quantize(tiny_llama, config, TEXTS[:1], tmp_path / "quant")


def _spec(model, config) -> EngineSpec:
    return EngineSpec(model=model, role=Role.eval, config=config)
