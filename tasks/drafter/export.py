"""The folder of a drafter: what vLLM loads, and beside it what the drafter is, for the contract check."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from infra.engine.drafters import CARD

if TYPE_CHECKING:
    import torch

PROBE = "probe.npz"


class DrafterCard(BaseModel):
    """What a drafter was made for.

    kind: as in `drafter.kind`; it decides how engines use the folder. target_tokenizer: digest of the target's
    tokenizer. num_speculative_tokens: proposals per target pass that it was judged by. layer_ids: auxiliary layers of a
    head, as captured. draft_vocab_size: tokens that it can propose, draft_vocab_coverage: their share of the target's
    answers, None where that is not known. tokens: rows trained on, in all. dtype: of its weights.
    """

    kind: str = "eagle3"
    target_tokenizer: str
    num_speculative_tokens: int
    layer_ids: list[int] = []
    draft_vocab_size: int = 0
    draft_vocab_coverage: float | None = 1.0
    tokens: int = 0
    dtype: str = ""


def export(
    model: "torch.nn.Module",
    weights: dict[str, "torch.Tensor"],
    folder: Path,
    card: DrafterCard,
    probe: tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"],
    dtype: "torch.dtype",
) -> None:
    """Write `model` (speculators' class) with its `weights`, all whole, in `dtype` to `folder`.

    probe: (auxiliary states [rows, aux_layers * hidden_size], input ids [rows]) of one sequence, and the
    `ttt.last_logits` that the trained model gives for it.

    The embedding is left out: the engine then uses the target's own, which is what the head was trained with.
    """
    import numpy as np

    state = {
        name: (w.to(dtype) if w.is_floating_point() else w).contiguous()
        for name, w in weights.items()
        if name != "embed_tokens.weight"
    }
    model.save_pretrained(folder, state_dict=state)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # Writers and engines differ in what they assume where these are absent.
    config["eagle_aux_hidden_state_layer_ids"] = card.layer_ids
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        config[flag] = bool(getattr(model.config, flag))
    # The folder of the target is another on the next machine; lineage names the target.
    config["speculators_config"]["verifier"]["name_or_path"] = None
    config["dtype"] = config["transformer_layer_config"]["dtype"] = card.dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    hidden, input_ids, logits = probe
    np.savez(folder / PROBE, hidden=hidden.float().cpu(), input_ids=input_ids.cpu(), logits=logits.float().cpu())
    (folder / CARD).write_text(card.model_dump_json(indent=2) + "\n")


def read_card(folder: Path) -> DrafterCard:
    """The card of the drafter in `folder`."""
    return DrafterCard.model_validate_json((folder / CARD).read_text())


def tokenizer_digest(model: Path) -> str:
    """`sha256:` of the tokenizer in a model folder: same digest, same token ids."""
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        if (model / name).is_file():
            return "sha256:" + hashlib.sha256((model / name).read_bytes()).hexdigest()
    raise FileNotFoundError(f"{model} has no tokenizer file")
