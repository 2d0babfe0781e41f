"""Training of an EAGLE-3 head on captured states, with speculators' model and losses."""

import math
from pathlib import Path

import torch
from pydantic import BaseModel

from infra.config.drafter import DrafterConfig
from tasks.drafter import heads
from tasks.drafter.dataset import Rows, answer_counts, batches, draft_vocab, pack, rows, split
from tasks.drafter.states import Captured, read_index, read_states
from tasks.drafter.walk import Walk, walk

HELD_OUT_CHECKS = 6


class Curve(BaseModel):
    """One entry per optimizer step; step 0 is the head before training. None where nothing was measured.

    loss: summed over training-time-test steps, nats per trained row. grad_norm: before clipping. held_out_acceptance:
    acceptance length on the held-out sequences.
    """

    step: list[int] = []
    loss: list[float | None] = []
    lr: list[float | None] = []
    grad_norm: list[float | None] = []
    held_out_acceptance: list[float | None] = []

    def add(self, step: int, **entry: float | None) -> None:
        self.step.append(step)
        for name in ("loss", "lr", "grad_norm", "held_out_acceptance"):
            getattr(self, name).append(entry.get(name))


class HeadTrainer:
    """Trains one head.

    target: folder of the target. states: folder of captured sequences. previous: folder of the drafter to start from,
    or none for a new head.
    Raises HeadError, DatasetError or StatesError when the three do not fit together.
    """

    def __init__(self, target: Path, states: Path, config: DrafterConfig, previous: Path | None = None):
        from speculators.losses import resolve_loss_config
        from transformers import AutoConfig

        self.config = config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        captured = list(read_states(states))
        self.layer_ids = read_index(states)[0].layer_ids[:-1]
        counts = answer_counts(captured)
        text = AutoConfig.from_pretrained(target).get_text_config()
        self.vocab = (
            heads.previous_vocab(previous, text.vocab_size, counts)
            if previous
            else draft_vocab(counts, text.vocab_size, config.draft_vocab_size)
        )
        torch.manual_seed(config.seed)
        self.model = heads.build(target, self.vocab, self.layer_ids, config)
        if previous:
            heads.warm_start(self.model, previous)
        else:
            heads.start_from_target(self.model, target, text.num_hidden_layers)
        heads.check_target_owned(self.model, target)
        self.model.to(self.device)
        train, held_out = split(captured, config.held_out_share, config.seed)
        self.train_rows = [self._rows(c) for c in train]
        self.held_out = held_out
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, weight_decay=0.0, fused=True)
        # The fused losses are Triton kernels.
        self.losses = resolve_loss_config(config.loss, "fused" if self.device == "cuda" else "eager")
        self.packs = batches(self.train_rows, config.micro_batch_tokens, config.seed)
        self.curve = Curve()
        self.tokens = 0

    def advance(self, count: int) -> None:
        """The next `count` steps of the config, or those that are left.

        Raises FloatingPointError when the loss is not finite.
        """
        steps = self.config.training_steps
        if not self.curve.step:
            self.curve.add(0, held_out_acceptance=self.acceptance().length)
        done = self.curve.step[-1]
        for step in range(done + 1, min(done + count, steps) + 1):
            lr = self.learning_rate(step)
            loss, grad_norm = self.step(next(self.packs), lr)
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss of drafter step {step} is {loss}: lower drafter.lr ({self.config.lr})")
            checked = step == steps or step % max(1, steps // HELD_OUT_CHECKS) == 0
            held_out = self.acceptance().length if checked else None
            self.curve.add(step, loss=loss, lr=lr, grad_norm=grad_norm, held_out_acceptance=held_out)

    def step(self, batch: Rows, lr: float) -> tuple[float, float]:
        """One optimizer step on `batch`; (loss summed over training-time-test steps, gradient norm before clipping)."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        _, loss, _ = self.model(
            **self._inputs(batch),
            loss_mask=batch.loss_mask[None].to(self.device),
            verifier_last_hidden_states=batch.target[None].to(self.device),
            ttt_steps=self.config.ttt_steps,
            ttt_step_loss_decay=self.config.ttt_decay,
            loss_config=self.losses,
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += len(batch)
        return loss.item(), norm.item()

    def learning_rate(self, step: int) -> float:
        """Of step 1..training_steps: linear warm-up to the peak, then a cosine down to a tenth of it."""
        steps, peak = self.config.training_steps, self.config.lr
        warmup = max(1, round(self.config.warmup_share * steps))
        if step <= warmup:
            return peak * step / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def acceptance(self, sequences: list[Captured] | None = None) -> Walk:
        """What the engine would accept of the head's proposals on `sequences` (the held-out ones by default).

        The answers were sampled from the target and the head proposes greedily, so this estimates serving at the
        temperature of the capture.
        """
        counted = Walk()
        for captured in self.held_out if sequences is None else sequences:
            counted += self.walk(captured)
        return counted

    def walk(self, captured: Captured) -> Walk:
        """`acceptance` of one sequence."""
        self.model.eval()
        sequence = rows(captured, max_rows=len(captured.sequence.token_ids))
        with torch.no_grad():
            drafted = self.model(**self._inputs(pack([sequence])), ttt_steps=self.config.num_speculative_tokens)
        proposals = torch.cat(drafted).cpu()
        return walk(self.vocab.target_ids[proposals], sequence.next_ids, captured.sequence.num_prompt_tokens - 1)

    def _rows(self, captured: Captured) -> Rows:
        return rows(captured, self.config.micro_batch_tokens, self.config.ttt_steps)

    def _inputs(self, batch: Rows) -> dict[str, torch.Tensor]:
        names = {"hidden_states": "hidden", **{n: n for n in ("input_ids", "document_ids", "position_ids")}}
        return {argument: getattr(batch, name)[None].to(self.device) for argument, name in names.items()}
