"""A drafter that was trained elsewhere: whether an engine can serve the target with it."""

import json
from pathlib import Path

from infra.store.models import check_weights
from tasks.drafter.contract import ContractError, aux_layer_ids
from tasks.drafter.drift import misfit
from tasks.drafter.export import CARD, DrafterCard, read_card, tokenizer_digest


def adopt(drafter: Path, target: Path, folder: Path) -> str:
    """Fill `folder` with links to the files of the folder `drafter`, and with the drafter's card where it has none;
    its kind.

    drafter: what `lockstep drafter` made elsewhere, of any kind, or an EAGLE-3 head in speculators' format. What a new
    card says of the target is taken from `target`: that it was made for it is the word of whoever adopts it, and
    measuring it shows whether it is true.
    Raises ModelError when it is no folder of weights, ContractError when it is no drafter or does not fit the target.
    """
    carded = (drafter / CARD).is_file()
    if not carded or read_card(drafter).kind != "ngram":
        check_weights(drafter)
    for file in drafter.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    if not carded:
        (folder / CARD).write_text(_card(drafter, target).model_dump_json(indent=1))
    if difference := misfit(folder, target):
        raise ContractError(f"{drafter} does not fit that target: {difference}")
    return read_card(folder).kind


def _card(drafter: Path, target: Path) -> DrafterCard:
    from transformers import AutoConfig

    config = json.loads((drafter / "config.json").read_text())
    if config.get("speculators_model_type") != "eagle3" or "transformer_layer_config" not in config:
        raise ContractError(f"{drafter} is not an EAGLE-3 head in speculators' format: `speculators convert` makes one")
    layers = AutoConfig.from_pretrained(target).get_text_config().num_hidden_layers
    proposed = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    return DrafterCard(
        layer_ids=config.get("eagle_aux_hidden_state_layer_ids") or aux_layer_ids(layers),
        target_tokenizer=tokenizer_digest(target),
        draft_vocab_size=config["draft_vocab_size"],
        draft_vocab_coverage=None,
        num_speculative_tokens=proposed,
        dtype=config.get("dtype") or "",
    )
