"""EAGLE-3 heads of speculators' model class: built for a target, from nothing or from an earlier version's drafter."""

import json
import os
from pathlib import Path

import torch

from infra.config.drafter import DrafterConfig
from tasks.drafter.dataset import DraftVocab, vocab_of

# Compiling is a cost without a gain on CPU, and must be off before speculators decorates its model.
if not torch.cuda.is_available():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

OWNED_BY_TARGET = ("embed_tokens.weight", "lm_head.weight", "model.norm.weight")  # in the target's own names
TARGET_OWNED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


class HeadError(ValueError):
    """A head that does not fit its target."""


def warm_up() -> None:
    """Import speculators, which takes seconds."""
    from speculators.models.eagle3 import Eagle3DraftModel  # noqa: F401


def build(target: Path, vocab: DraftVocab, layer_ids: list[int], config: DrafterConfig) -> torch.nn.Module:
    """An untrained head for `target`: its embedding, output head and final norm are the target's, frozen. The rest is
    drawn with torch's generator, so seed it; `start_from_target` then gives most of it a better start.

    target: folder of the target. layer_ids: the auxiliary layers, as captured.
    """
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig, LlamaConfig

    _hush()
    text = AutoConfig.from_pretrained(target).get_text_config()
    layer = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=text.rope_parameters,
        tie_word_embeddings=False,
    )
    on_gpu = torch.cuda.is_available()
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=vocab.t2d,
        d2t=vocab.d2t,
        draft_vocab_size=len(vocab.d2t),
        norm_before_residual=False,
        target_layer_ids=list(layer_ids),
        ttt_steps=config.num_speculative_tokens,
        verifier_name_or_path=str(target),
        draft_attn_impl="simple_flex_attention" if on_gpu else "eager",
    )


def start_from_target(model: torch.nn.Module, target: Path, num_layers: int) -> None:
    """Give an untrained head what its target knows: of the target's last layer but one, attention (on the half of its
    input that holds the target's states), MLP and norms; the final norm; and the mean of the auxiliary states as fused
    state. Tensors that the target does not have in these shapes, such as the MLP of a mixture of experts, stay random.

    num_layers: of the target.
    """
    own = dict(model.layers[0].named_parameters())
    sources = {name: name for name in own if name.startswith(("self_attn", "mlp", "post_attention_layernorm"))}
    sources["hidden_norm.weight"] = "input_layernorm.weight"
    prefix = f"model.layers.{num_layers - 2}."
    weights = target_weights(target, *(prefix + source for source in sources.values()))
    width = model.hidden_size
    with torch.no_grad():
        for name, source in sources.items():
            weight, goal = weights.get(prefix + source), own[name]
            if name.startswith(("self_attn.q_", "self_attn.k_", "self_attn.v_")):
                goal = goal[:, width:]
            if weight is not None and weight.shape == goal.shape:
                goal.copy_(weight)
        model.norm.weight.copy_(model.verifier_norm.weight)
        states = model.fc.weight.view(width, -1, width)
        states.copy_(torch.eye(width)[:, None] / states.shape[1])


def previous_vocab(previous: Path, vocab_size: int, counts) -> DraftVocab:
    """The draft vocabulary of the drafter in `previous`, with its coverage of answers counted as `counts`.

    Raises HeadError when its ids lie outside the target's vocabulary.
    """
    weights = load_weights(previous)
    if "d2t" not in weights:  # a head over the whole vocabulary
        size = json.loads((previous / "config.json").read_text())["draft_vocab_size"]
        weights["d2t"] = torch.zeros(size, dtype=torch.long)
    target_ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size:
        raise HeadError(
            f"the drafter in {previous} proposes ids up to {int(target_ids.max())}, the target has {vocab_size} "
            f"tokens: train from scratch (drafter.warm_start=false)"
        )
    return vocab_of(target_ids, vocab_size, counts)


def warm_start(model: torch.nn.Module, previous: Path) -> None:
    """Copy into `model`, built for the new target, all that training changed in `previous`.

    Embedding, output head and final norm stay the new target's: a copy of the old ones is what the old target was.
    Raises HeadError when the two heads differ in shape or layers.
    """
    weights = {name: w for name, w in load_weights(previous).items() if name not in (*TARGET_OWNED, "d2t", "t2d")}
    own = {name for name in model.state_dict() if name not in (*TARGET_OWNED, "d2t", "t2d")}
    if own != set(weights):
        raise HeadError(
            f"the drafter in {previous} has other parameters ({', '.join(sorted(own ^ set(weights)))} differ): "
            f"train from scratch (drafter.warm_start=false)"
        )
    state = model.state_dict()
    for name, weight in weights.items():
        if state[name].shape != weight.shape:
            raise HeadError(
                f"{name} is {list(weight.shape)} in {previous}, {list(state[name].shape)} here: "
                f"train from scratch (drafter.warm_start=false)"
            )
        state[name].copy_(weight)


def check_target_owned(model: torch.nn.Module, target: Path) -> None:
    """Raises HeadError unless embedding, output heads and final norm of `model` are those of `target`, bit for bit."""
    weights = target_weights(target, *OWNED_BY_TARGET)
    embedding, head = weights["embed_tokens.weight"], weights["lm_head.weight"]
    rows = head if model.t2d is None else head[model.t2d.cpu()]
    expected = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": rows,
        "verifier_lm_head.weight": rows,
        "verifier_norm.weight": weights["model.norm.weight"],
    }
    state = model.state_dict()
    for name in TARGET_OWNED:
        if not torch.equal(state[name].cpu(), expected[name].to(state[name].dtype)):
            raise HeadError(f"{name} of the head is not that of the target in {target}")


def target_weights(target: Path, *names: str) -> dict[str, torch.Tensor]:
    """Tensors of the target in `target` by name or end of name, as far as it has them; `lm_head.weight` is the
    embedding where the two are tied."""
    from speculators.utils.loading import load_model_layers

    _hush()
    weights = load_model_layers(list(names), str(target))
    if "lm_head.weight" in names and "embed_tokens.weight" in weights:
        weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    return weights


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the exported drafter in `folder`."""
    from safetensors.torch import load_file

    return {name: w for path in sorted(folder.glob("*.safetensors")) for name, w in load_file(path).items()}


def _hush() -> None:
    """speculators warns of every tensor that a small or tied model does not have."""
    from loguru import logger

    logger.disable("speculators")
