"""A small language model as drafter: some layers of the target, distilled on the target's own answers.

It has the target's tokenizer, embedding and head to begin with, proposes from tokens alone, and needs no hidden states.
"""

import shutil
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from infra.cluster.ranks import Ranks, whole
from infra.config.drafter import DrafterConfig
from tasks.drafter.answers import Answered
from tasks.drafter.dataset import DatasetError, schedule, split_by_domain
from tasks.drafter.export import CARD, DrafterCard
from tasks.drafter.loop import TrainingLoop
from tasks.drafter.walk import Walk, walk

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja")


@dataclass
class Batch:
    """input_ids, labels: [sequences, tokens] int64, padded on the right; label -100 where nothing is trained."""

    input_ids: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return self.trained

    @property
    def trained(self) -> int:
        """Tokens that the loss reads: the first of a sequence follows nothing."""
        return int((self.labels[:, 1:] != -100).sum())

    def idle(self) -> "Batch":
        """The same sequences, of which the loss reads nothing."""
        return replace(self, labels=torch.full_like(self.labels, -100))

    def to(self, device: str) -> "Batch":
        """The same on `device`."""
        return Batch(self.input_ids.to(device), self.labels.to(device))


class DraftModelTrainer(TrainingLoop):
    """Trains one draft model.

    target: folder of the target. answered: the target's answers. previous: folder of the draft model to start from, or
    none to start from `config.num_layers` layers of the target, evenly spaced, the first and the last among them.
    Raises DatasetError when the answers teach nothing.
    """

    def __init__(
        self,
        target: Path,
        answered: List[Answered],
        config: DrafterConfig,
        previous: Path | None = None,
        ranks: Ranks | None = None,
    ):
        from transformers import AutoModelForCausalLM

        self.ranks = ranks or Ranks()
        self.config, self.target = config, target
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(config.seed)
        source = previous or target
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        if previous is None:
            keep_layers(self.model, config.num_layers)
        self.model.to(self.device)
        self.train, self.held_out = split_by_domain(answered, config.held_out_share, config.seed)
        if not any(end - start > 1 for a in self.train for start, end in a.answers):
            raise DatasetError("no answer has two generated tokens: nothing to learn; raise max_new_tokens")
        lengths = [min(len(a.token_ids), config.micro_batch_tokens) for a in self.train]
        weight_of = {source.domain: source.weight for source in config.traffic}
        weights = [weight_of.get(a.domain, 1.0) for a in self.train]
        self.start(schedule(lengths, config.micro_batch_tokens, config.seed, weights))

    def batch(self, chosen: List[int]) -> Batch:
        """The training answers with these numbers, cut after `micro_batch_tokens`."""
        cut = self.config.micro_batch_tokens
        token_ids = [torch.tensor(self.train[i].token_ids[:cut]) for i in chosen]
        labels = [torch.full_like(ids, -100) for ids in token_ids]
        for index, ids, label in zip(chosen, token_ids, labels, strict=True):
            for start, end in self.train[index].answers:
                label[start:end] = ids[start:end]
        pad = torch.nn.utils.rnn.pad_sequence
        return Batch(pad(token_ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100))

    def loss(self, batch: Batch, trained: int) -> torch.Tensor:
        """Cross-entropy of the generated tokens: distillation on the teacher's sequences (Kim and Rush 2016)."""
        return self.compute(_cross_entropy, batch.input_ids, batch.labels, trained)

    def walk(self, sequences: List[Answered]) -> Walk:
        """`acceptance` of some answers."""
        return sum(map(self._walk, sequences), Walk())

    def _walk(self, sequence: Answered) -> Walk:
        token_ids = torch.tensor(sequence.token_ids)
        following = self.compute(_following, token_ids.to(self.device)).cpu()
        k, rows = self.config.num_speculative_tokens, len(token_ids) - 2
        proposed = torch.stack([_shift(following, i, rows) for i in range(k)])
        counted = Walk()
        for start, end in sequence.answers:
            counted += walk(proposed[:, : end - 2], token_ids[2:end], start - 1)
        return counted

    def write(self, folder: Path, tokenizer: str, dtype: str) -> None:
        """Write the model as it is, with the target's tokenizer, to `folder`."""
        weights = {n: whole(w).to(getattr(torch, dtype)) for n, w in self.model.state_dict().items()}
        if self.ranks.rank > 0:
            return
        self.model.save_pretrained(folder, state_dict=weights)
        for pattern in TOKENIZER_FILES:
            for path in self.target.glob(pattern):
                shutil.copyfile(path, folder / path.name)
        config = self.model.config.get_text_config()
        card = DrafterCard(
            kind="draft_model",
            target_tokenizer=tokenizer,
            draft_vocab_size=config.vocab_size,
            num_speculative_tokens=self.config.num_speculative_tokens,
            tokens=self.tokens,
            dtype=dtype,
        )
        (folder / CARD).write_text(card.model_dump_json(indent=2) + "\n")

    @property
    def coverage(self) -> float:
        """It proposes whatever the target can say."""
        return 1.0

    @staticmethod
    def sequence(one: Answered) -> Answered:
        """Itself."""
        return one


def _cross_entropy(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, trained: int) -> torch.Tensor:
    # Padding stands behind the last token, where causal attention does not look.
    states = model.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    read = labels != -100
    summed = torch.nn.functional.cross_entropy(model.lm_head(states[read]).float(), labels[read], reduction="sum")
    return summed / trained


def _following(model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """[t]: proposed behind token t."""
    return model(token_ids[None], use_cache=False).logits[0].argmax(-1)


def _shift(following: torch.Tensor, i: int, rows: int) -> torch.Tensor:
    """Proposals of position i [rows]; -1 behind the last token."""
    shifted = following[1 + i : 1 + i + rows]
    return torch.nn.functional.pad(shifted, (0, rows - len(shifted)), value=-1)


def keep_layers(model: torch.nn.Module, count: int) -> None:
    """Leave `count` decoder layers of a causal language model, evenly spaced from the first to the last."""
    layers, config = model.model.layers, model.config.get_text_config()
    count = min(count, len(layers))
    kept = [round(i * (len(layers) - 1) / max(1, count - 1)) for i in range(count)]
    model.model.layers = torch.nn.ModuleList(layers[i] for i in kept)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
