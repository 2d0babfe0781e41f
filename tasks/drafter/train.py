"""Training of an EAGLE-3 head on captured states, with speculators' model and losses."""

from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path

import torch

from infra.cluster.ranks import Ranks, whole
from infra.config.drafter import DrafterConfig
from tasks.drafter import attention, heads, ttt
from tasks.drafter.dataset import Rows, answer_counts, draft_vocab, pack, packs, require_learnable, rows, split
from tasks.drafter.export import DrafterCard, export
from tasks.drafter.loop import TrainingLoop
from tasks.drafter.states import Captured, Sequence, read_index, read_states
from tasks.drafter.ttt import plan
from tasks.drafter.walk import Walk, walk


class HeadTrainer(TrainingLoop):
    """Trains one head.

    target: folder of the target. states: folder of captured sequences. previous: folder of the drafter to start from,
    or none for a new head. only: key of the one sequence to train on, for the overfit check.
    Raises HeadError, DatasetError or StatesError when the three do not fit together.
    """

    def __init__(
        self,
        target: Path,
        states: Path,
        config: DrafterConfig,
        previous: Path | None = None,
        only: str | None = None,
        ranks: Ranks | None = None,
    ):
        self.ranks = ranks or Ranks()
        captured = list(read_states(states))
        if only is None:
            train, held_out = split(captured, config.held_out_share, config.seed)
        else:
            train = held_out = [c for c in captured if c.sequence.key == only]
        layer_ids = read_index(states)[0].layer_ids[:-1]
        self._build(target, config, previous, layer_ids, [c.sequence for c in captured])
        self._begin(train, held_out)

    def _build(
        self, target: Path, config: DrafterConfig, previous: Path | None, layer_ids: list[int], answers: List[Sequence]
    ) -> None:
        """The head before training. answers: all that decide about the draft vocabulary."""
        from speculators.losses import resolve_loss_config
        from transformers import AutoConfig

        self.config, self.layer_ids = config, layer_ids
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        text = AutoConfig.from_pretrained(target).get_text_config()
        counts = answer_counts(answers)
        self.vocab = (
            heads.previous_vocab(previous, text.vocab_size, counts)
            if previous
            else draft_vocab(counts, text.vocab_size, config.draft_vocab_size)
        )
        torch.manual_seed(config.seed)
        self.model = heads.build(target, self.vocab, layer_ids, config)
        if previous:
            heads.warm_start(self.model, previous)
        else:
            heads.start_from_target(self.model, target, text.num_hidden_layers)
        heads.check_target_owned(self.model, target)
        self.model.to(self.device)
        # The fused losses are Triton kernels.
        self.losses = resolve_loss_config(config.loss, "fused" if self.device == "cuda" else "eager")

    def _begin(self, train: list, held_out: list[Captured]) -> None:
        """train: captured sequences, or such without states."""
        self.train, self.held_out = train, held_out
        self.seen: dict[int, Rows] = {}  # of sequences that came before: views of their states, and small tensors
        require_learnable(map(self.sequence, train), self.config.micro_batch_tokens)
        self.start(packs(list(map(self.sequence, train)), self.config))

    def batch(self, chosen: List[int]) -> Rows:
        """A pack of the training sequences with these numbers."""
        for i in chosen:
            if i not in self.seen:
                self.seen[i] = self.rows(self.train[i])
        return self.packed([self.seen[i] for i in chosen])

    def rows(self, one: Captured) -> Rows:
        """What is trained on of a sequence."""
        return rows(one, self.config.micro_batch_tokens, self.config.ttt_steps)

    def packed(self, sequences: List[Rows]) -> Rows:
        """A pack of these sequences, and what its loss will compute."""
        batch = pack(sequences, pinned=self.device == "cuda")
        way = attention.fits(self.device, self.config)
        asked = plan(batch, self.config.ttt_steps, self.config.num_layers, way)
        return replace(batch, plan=asked)

    def loss(self, batch: Rows, trained: int) -> torch.Tensor:
        """Summed over training-time-test steps, with their weights."""
        return self.compute(ttt.loss, batch.to(self.device), trained, self.config, self.losses)

    def walk(self, sequences: List[Captured]) -> Walk:
        """`acceptance` of some sequences, computed as one pack."""
        every = pack([rows(one, max_rows=len(one.sequence.token_ids)) for one in sequences])
        spans, first = [], 0
        for one in sequences:
            spans += [(first + start - 1, first + end - 2) for start, end in one.sequence.answers]
            first += one.sequence.num_states - 1
        wanted = torch.cat([torch.arange(*span) for span in spans]).to(self.device)
        drafted = self.compute(ttt.proposals, every.to(self.device), wanted, self.config.num_speculative_tokens)
        proposed = self.vocab.target_ids[drafted.cpu()]
        counted = Walk()
        for (start, end), part in zip(spans, proposed.split([end - start for start, end in spans], dim=1), strict=True):
            counted += walk(part, every.next_ids[start:end], 0)
        return counted

    def write(self, folder: Path, tokenizer: str, dtype: str) -> None:
        """Write the head with its card and a probe of its logits."""
        example = self.held_out[0]
        probe = rows(example, max_rows=len(example.sequence.token_ids))
        card = DrafterCard(
            layer_ids=self.layer_ids,
            target_tokenizer=tokenizer,
            draft_vocab_size=len(self.vocab.d2t),
            draft_vocab_coverage=self.vocab.coverage,
            num_speculative_tokens=self.config.num_speculative_tokens,
            tokens=self.tokens,
            dtype=dtype,
        )
        state = {name: whole(w) for name, w in self.model.state_dict().items()}
        with self.whole_weights():
            logits = self.compute(ttt.last_logits, probe.to(self.device))
        if self.ranks.rank == 0:
            export(self.model, state, folder, card, (probe.hidden, probe.input_ids, logits), getattr(torch, dtype))

    @property
    def coverage(self) -> float:
        """Of the draft vocabulary."""
        return self.vocab.coverage

    @staticmethod
    def sequence(one: Captured) -> Sequence:
        """Without the states."""
        return one.sequence


class StreamedHeadTrainer(HeadTrainer):
    """Trains one head on states that come and go: the same steps on the same packs as `HeadTrainer`.

    states: folder of captured sequences, among them those to look at, of keys `held_out`. answers: all sequences that
    are trained on, without states, in the order of `split`.
    """

    def __init__(
        self,
        target: Path,
        states: Path,
        held_out: List[str],
        answers: List[Sequence],
        config: DrafterConfig,
        previous: Path | None = None,
        ranks: Ranks | None = None,
    ):
        self.ranks = ranks or Ranks()
        captured = {c.sequence.key: c for c in read_states(states)}
        looked_at = [captured[key] for key in held_out]
        every = [*answers, *(c.sequence for c in looked_at)]
        self._build(target, config, previous, read_index(states)[0].layer_ids[:-1], every)
        self.loaded: dict[str, Captured] = {}
        self._begin(list(answers), looked_at)

    def receive(self, states: Path) -> None:
        """Hold the states in the folder `states`, and no others: those of the next packs."""
        self.loaded = {c.sequence.key: c for c in read_states(states)}

    def batch(self, chosen: List[int]) -> Rows:
        """A pack of the training sequences with these numbers, which have been received."""
        return self.packed([self.rows(self.loaded[self.train[i].key]) for i in chosen])

    @staticmethod
    def sequence(one: Captured | Sequence) -> Sequence:
        """Without the states."""
        return one.sequence if isinstance(one, Captured) else one
