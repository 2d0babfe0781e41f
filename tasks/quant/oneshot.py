"""The part of `tasks.quant.compressor` that runs in llm-compressor's own environment: `python oneshot.py REQUEST.json`.

It must import nothing of Lockstep. The request: model, folder (paths), recipe (text), scheme, group_size (0: the
scheme's own), ignore (names or `re:` patterns), texts (token ids).
"""

import json
import sys
from pathlib import Path

ROUNDS = {"GPTQModifier", "QuantizationModifier"}
"""Modifiers of a recipe that round weights: the scheme and what it leaves alone are theirs."""


def main(request: dict) -> None:
    """Write the quantized model into `request["folder"]`."""
    import torch
    import yaml
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    recipe = yaml.safe_load(request["recipe"])
    for stage in recipe.values():
        for modifiers in stage.values():
            for name, settings in modifiers.items():
                settings |= {"ignore": request["ignore"]} if name in ROUNDS else {}
                settings |= {"config_groups": {"group_0": _scheme(request)}} if name in ROUNDS else {}
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto")
    texts = [{"input_ids": t, "attention_mask": torch.ones_like(t)} for t in map(_tensor, request["texts"])]
    oneshot(
        model=model,
        recipe=yaml.safe_dump(recipe),
        dataset=torch.utils.data.DataLoader(texts, batch_size=1, collate_fn=lambda batch: batch[0]),
        num_calibration_samples=len(texts),
    )
    model.save_pretrained(request["folder"], save_compressed=True)


def _scheme(request: dict) -> dict:
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(request["scheme"], ["Linear"])
    if request["group_size"]:
        scheme.weights.group_size = request["group_size"]
    return scheme.model_dump(mode="json", exclude_none=True)


def _tensor(tokens: list[int]):
    import torch

    return torch.tensor([tokens])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
