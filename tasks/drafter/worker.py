"""The process that trains heads: it holds torch and speculators, whose import takes as long as an engine's start."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from infra.config.drafter import DrafterConfig

if TYPE_CHECKING:
    from tasks.drafter.train import HeadTrainer


class Progress(BaseModel):
    """step: optimizer steps done; loss: of the last; acceptance: held-out acceptance length when last looked at."""

    step: int
    loss: float | None
    acceptance: float


class Expected(BaseModel):
    """What the engine should accept on the held-out sequences: their prompts and lengths, and the head's proposals."""

    prompts: list[list[int]]
    num_new_tokens: list[int]
    drafts: int
    accepted: list[int]


class TrainingResult(BaseModel):
    """curve: the fields of `train.Curve`. tokens: rows trained on. expected: on the held-out sequences."""

    curve: dict[str, list[float | None]]
    tokens: int
    draft_vocab_coverage: float
    expected: Expected


class TrainerWorker:
    """Trains one head at a time; meant to run as an actor of its own."""

    def __init__(self) -> None:
        self.trainer: HeadTrainer | None = None

    def warm_up(self) -> None:
        """Import what training needs."""
        from tasks.drafter import heads, train  # noqa: F401

        heads.warm_up()

    def begin(self, target: Path, states: Path, config: DrafterConfig, previous: Path | None) -> None:
        """Build the head and load the states."""
        from tasks.drafter.train import HeadTrainer

        self.trainer = HeadTrainer(target, states, config, previous)

    def advance(self, steps: int) -> Progress:
        """Train `steps` more."""
        self.trainer.advance(steps)
        curve = self.trainer.curve
        seen = [a for a in curve.held_out_acceptance if a is not None]
        return Progress(step=curve.step[-1], loss=curve.loss[-1], acceptance=seen[-1])

    def export(self, folder: Path, tokenizer: str, dtype: str) -> None:
        """Write the head as it is to `folder`. tokenizer: digest of the target's; dtype: of the engines."""
        import torch

        from tasks.drafter.dataset import rows
        from tasks.drafter.export import DrafterCard, export

        trainer = self.trainer
        sequence = trainer.held_out[0]
        probe = rows(sequence, max_rows=len(sequence.sequence.token_ids))
        card = DrafterCard(
            layer_ids=trainer.layer_ids,
            target_tokenizer=tokenizer,
            draft_vocab_size=len(trainer.vocab.d2t),
            draft_vocab_coverage=trainer.vocab.coverage,
            num_speculative_tokens=trainer.config.num_speculative_tokens,
            tokens=trainer.tokens,
            dtype=dtype,
        )
        export(trainer.model, folder, card, (probe.hidden, probe.input_ids), getattr(torch, dtype))

    def result(self) -> TrainingResult:
        """What training came to."""
        trainer = self.trainer
        walked = trainer.acceptance()
        return TrainingResult(
            curve=trainer.curve.model_dump(),
            tokens=trainer.tokens,
            draft_vocab_coverage=trainer.vocab.coverage,
            expected=Expected(
                prompts=[c.sequence.token_ids[: c.sequence.num_prompt_tokens] for c in trainer.held_out],
                num_new_tokens=[len(c.sequence.token_ids) - c.sequence.num_prompt_tokens for c in trainer.held_out],
                drafts=walked.drafts,
                accepted=walked.accepted,
            ),
        )
