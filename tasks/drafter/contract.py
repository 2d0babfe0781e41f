"""What must hold before a drafter is served: nearly every way to get it wrong is silent, and only makes it slow."""

import json
from pathlib import Path

from tasks.drafter.export import PROBE, read_card, tokenizer_digest
from tasks.drafter.walk import Walk

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class ContractError(ValueError):
    """A drafter that does not fit its target, or is not what was trained."""


def aux_layer_ids(num_layers: int) -> list[int]:
    """Auxiliary layers of EAGLE-3 for a target of `num_layers`: 2, n//2, n-3.

    Raises ContractError when the target is too shallow for three different ones.
    """
    ids = [2, num_layers // 2, num_layers - 3]
    if sorted(set(ids)) != ids:
        raise ContractError(f"a target of {num_layers} layers has no three auxiliary layers 2, n//2, n-3: 7 are needed")
    return ids


def captured_layers(target: Path) -> list[int]:
    """What is captured of the target in `target`: its auxiliary layers, then its final state before the final norm."""
    from transformers import AutoConfig

    num_layers = AutoConfig.from_pretrained(target).get_text_config().num_hidden_layers
    return [*aux_layer_ids(num_layers), num_layers]


def check(drafter: Path, target: Path) -> None:
    """Check the folder of a drafter against that of its target.

    Layer ids, norm flags, shapes, draft vocabulary, output head, tokenizer and dtype are compared, and the logits of
    the stored probe are computed again from the files, by code that shares nothing with the trainer's.
    Raises ContractError with every difference found.
    """
    import numpy as np
    import torch
    from transformers import AutoConfig

    from tasks.drafter.heads import load_weights, target_weights
    from tasks.drafter.reference import first_logits

    card, config = read_card(drafter), json.loads((drafter / "config.json").read_text())
    text = AutoConfig.from_pretrained(target).get_text_config()
    weights = load_weights(drafter)
    wrong = []

    def expect(what: str, found, expected) -> None:
        if found != expected:
            wrong.append(f"{what} is {found}, expected {expected}")

    expect("eagle_aux_hidden_state_layer_ids", config.get("eagle_aux_hidden_state_layer_ids"), card.layer_ids)
    expect("the auxiliary layers", card.layer_ids, aux_layer_ids(text.num_hidden_layers))
    for flag in NORM_FLAGS:
        expect(f"{flag} (must be written out)", type(config.get(flag)), bool)
    layer = config["transformer_layer_config"]
    expect("hidden_size", layer["hidden_size"], text.hidden_size)
    expect("vocab_size", layer["vocab_size"], text.vocab_size)
    expect("the tokenizer's digest", tokenizer_digest(target), card.target_tokenizer)
    expect(
        "the dtypes",
        {str(w.dtype).removeprefix("torch.") for w in weights.values() if w.is_floating_point()},
        {card.dtype},
    )

    owned = target_weights(target, "embed_tokens.weight", "lm_head.weight")
    embedding, head = owned["embed_tokens.weight"], owned["lm_head.weight"]
    expect("draft_vocab_size", config["draft_vocab_size"], card.draft_vocab_size)
    expect("rows of lm_head", len(weights["lm_head.weight"]), card.draft_vocab_size)
    if card.draft_vocab_size < text.vocab_size:
        # Without d2t the engine takes draft ids for target ids and says nothing.
        d2t = weights.get("d2t", torch.zeros(0, dtype=torch.long))
        expect("entries of d2t", len(d2t), card.draft_vocab_size)
        ids = d2t + torch.arange(len(d2t))
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= text.vocab_size or not bool((ids.diff() > 0).all())):
            wrong.append(f"d2t maps outside 0..{text.vocab_size - 1} or is not increasing")
        else:
            head = head[ids]
    if weights["lm_head.weight"].shape != head.shape or not torch.equal(
        weights["lm_head.weight"], head.to(weights["lm_head.weight"].dtype)
    ):
        wrong.append("lm_head is not the target's: the head was trained for another target version")
    if not wrong:
        with np.load(drafter / PROBE) as probe:
            hidden, input_ids, logits = (torch.from_numpy(probe[n]) for n in ("hidden", "input_ids", "logits"))
        dtype = weights["lm_head.weight"].dtype
        again = first_logits(weights, config, embedding.to(dtype), hidden.to(dtype), input_ids)[-len(logits) :].float()
        tolerance = 1e-3 if dtype == torch.float32 else 5e-2
        worst = float((again - logits).abs().max() / logits.abs().max())
        if not worst <= tolerance:
            wrong.append(
                f"logits recomputed from the files differ from the trained head's by {worst:.2g} of the largest"
            )
    if wrong:
        raise ContractError(f"drafter {drafter.name} does not fit target {target.name}: " + "; ".join(wrong))


def check_served(served: Walk, expected: Walk, sequences: int) -> None:
    """Compare what the engine accepted on sequences that were captured with what the trained head proposes there.

    The last block of each sequence reaches past what was captured and is counted by the engine alone; near-ties may
    flip a few more. Raises ContractError when more than that differs.
    """
    slack = sequences * (len(expected.accepted) + 1) + 0.05 * expected.drafts
    pairs = [(served.drafts, expected.drafts), *zip(served.accepted, expected.accepted, strict=True)]
    if any(abs(a - b) > slack for a, b in pairs):
        raise ContractError(
            f"the engine accepted {served.accepted} of {served.drafts} drafts by position, the trained head proposes "
            f"{expected.accepted} of {expected.drafts} on the same sequences: layer ids, norm flags or vocabulary "
            f"differ"
        )


def check_whole(served: Walk) -> None:
    """Raises ContractError unless the engine accepted at least one block to its last token of an answer that the served
    head knows by heart."""
    if not served.accepted or not served.accepted[-1]:
        raise ContractError(
            f"the engine accepts {served.accepted} of {served.drafts} drafts by position of an answer that the head "
            f"knows by heart: layer ids, norm flags, vocabulary or dtype differ between training and serving"
        )


def check_draft_model(drafter: Path, target: Path) -> None:
    """Check the folder of a draft model against that of its target: its tokens must mean the same.

    Raises ContractError when tokenizer or vocabulary differ.
    """
    from transformers import AutoConfig

    card = read_card(drafter)
    sizes = [AutoConfig.from_pretrained(folder).get_text_config().vocab_size for folder in (drafter, target)]
    digests = [tokenizer_digest(drafter), tokenizer_digest(target), card.target_tokenizer]
    if len(set(sizes)) > 1 or len(set(digests)) > 1:
        raise ContractError(
            f"draft model {drafter.name} has another vocabulary than target {target.name} ({sizes[0]} and {sizes[1]} "
            f"tokens, tokenizers {', '.join(digests)}): train one for this target"
        )
