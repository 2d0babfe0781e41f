"""Whether a drafter or quant fits the target that it is released with, read from their files: what does not fit loads
without a word and is merely slow, or wrong."""

import hashlib
import json
from pathlib import Path

from infra.lineage.versions import Version
from infra.store.base import Store
from tasks.evaluate.evidence import row

CARD = "lockstep.json"  # what a drafter says of itself
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""What engine and trainer guess differently where an EAGLE-3 head does not say it."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def rows(store: Store, target: Version, part: Version) -> list[dict]:
    """Figures `drafter_misfit` or `quant_misfit`, 1 where the part does not fit, else 0, by domain:

    `target`: made from another content than the target's. `tokenizer`: made for other token ids. `vocabulary`: another
    number of tokens. `norm flags`: an EAGLE-3 head whose config leaves one open.
    """
    base, folder = store.open(target.artifact), store.open(part.artifact)
    made_from = {ref.digest for ref in store.manifest(part.artifact).inputs}
    misfits = {
        "target": target.artifact.digest not in made_from,
        "tokenizer": tokenizer(folder) not in (None, tokenizer(base)),
    }
    if (folder / "config.json").is_file():  # n-gram lookup is no model
        config = json.loads((folder / "config.json").read_text())
        misfits["vocabulary"] = vocabulary(config) != vocabulary(json.loads((base / "config.json").read_text()))
        if "Eagle3" in "".join(config.get("architectures") or ()):
            misfits["norm flags"] = any(not isinstance(config.get(flag), bool) for flag in NORM_FLAGS)
    return [
        row(f"{part.kind}_misfit", float(wrong), n=1, unit="1 or 0", domain=domain, subject=part.subject)
        for domain, wrong in misfits.items()
    ]


def tokenizer(folder: Path) -> str | None:
    """`sha256:` of the tokenizer that the model in `folder` was made for; None where it does not say."""
    if (folder / CARD).is_file():
        return json.loads((folder / CARD).read_text())["target_tokenizer"]
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return "sha256:" + hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return None


def vocabulary(config: dict) -> int:
    """Number of tokens that a config is about: an EAGLE-3 head's is its target's."""
    for inner in ("transformer_layer_config", "text_config"):
        config = config.get(inner, config)
    return config["vocab_size"]
