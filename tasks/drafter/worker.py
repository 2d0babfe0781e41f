"""The process that trains drafters: it holds torch and speculators, whose import takes as long as an engine's start."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from infra.config.drafter import DrafterConfig

if TYPE_CHECKING:
    from infra.cluster.ranks import Ranks
    from tasks.drafter.answers import Answered
    from tasks.drafter.loop import TrainingLoop
    from tasks.drafter.states import Sequence


WHOLE = 0.5
"""Share of the blocks of a single answer that a head which learned it by heart must get right to the last token."""


class Progress(BaseModel):
    """step: optimizer steps done; loss: of the last; acceptance: held-out acceptance length when last looked at.
    finished: whether training has ended."""

    step: int
    loss: float | None
    acceptance: float
    finished: bool


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
    """Trains one drafter at a time; meant to run as an actor of its own.

    rank: of `world` such workers, from 0, which share the work: each is told the same.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self._rank, self._world = rank, world
        self.trainer: TrainingLoop | None = None
        self.checkpoint: Path | None = None

    def meet(self) -> str:
        """Where the other ranks find this one, the first."""
        from infra.cluster.ranks import Meeting

        self._meeting = Meeting()
        return self._meeting.address

    def warm_up(self, meeting: str | None = None) -> None:
        """Import what training needs, and form a group with the other ranks where the first one has said where."""
        from infra.cluster.ranks import Meeting
        from tasks.drafter import heads, train  # noqa: F401

        heads.warm_up()
        if meeting is not None:
            self._ranks().connect(self._meeting.store if self._rank == 0 else Meeting.at(meeting))

    def _ranks(self) -> "Ranks":
        from infra.cluster.ranks import Ranks

        return Ranks(self._rank, self._world)

    def begin(self, target: Path, states: Path, config: DrafterConfig, previous: Path | None) -> None:
        """Build the head and load the states."""
        from tasks.drafter.train import HeadTrainer

        self.trainer, self.checkpoint = HeadTrainer(target, states, config, previous, ranks=self._ranks()), None

    def begin_streamed(
        self,
        target: Path,
        states: Path,
        held_out: list[str],
        answers: "list[Sequence]",
        config: DrafterConfig,
        previous: Path | None,
    ) -> None:
        """Build the head; the states of `answers` come with `consume`."""
        from tasks.drafter.train import StreamedHeadTrainer

        self.trainer = StreamedHeadTrainer(target, states, held_out, answers, config, previous, self._ranks())
        self.checkpoint = None

    def consume(self, states: Path, steps: int) -> Progress:
        """Train on the captured states of the next `steps` packs, whose folder is then removed."""
        self.trainer.receive(states)
        self.trainer.ranks.sum([0])  # every rank has read them
        if self._rank == 0:
            shutil.rmtree(states)
        return self.advance(steps)

    def begin_draft_model(
        self, target: Path, answers: "list[Answered]", config: DrafterConfig, previous: Path | None
    ) -> None:
        """Build the draft model."""
        from tasks.drafter.draft_model import DraftModelTrainer

        self.trainer, self.checkpoint = DraftModelTrainer(target, answers, config, previous, self._ranks()), None

    def resume(self, checkpoint: Path) -> int:
        """Go on from the file `checkpoint` if there is one, and write it every `checkpoint_every` steps from here on.
        The number of steps done."""
        self.checkpoint = checkpoint
        if checkpoint.is_file():
            self.trainer.load(checkpoint)
        return self.trainer.steps

    def advance(self, steps: int) -> Progress:
        """Train `steps` more."""
        trainer, every = self.trainer, self.trainer.config.checkpoint_every
        before = trainer.steps
        trainer.advance(steps)
        curve = trainer.curve
        if self.checkpoint and not trainer.finished and trainer.steps // every > before // every:
            trainer.save(self.checkpoint)
        return Progress(
            step=curve.step[-1], loss=curve.loss[-1], acceptance=curve.looks()[-1], finished=trainer.finished
        )

    def overfit(self, target: Path, states: Path, config: DrafterConfig, only: str, most: int) -> float:
        """A head trained on the one sequence with the key `only`; the share of its blocks that it proposes right to the
        last token, after at most `most` steps."""
        from tasks.drafter.train import HeadTrainer

        self.trainer = HeadTrainer(target, states, config, only=only, ranks=self._ranks())
        return self.trainer.overfit(most)

    def export(self, folder: Path, tokenizer: str, dtype: str) -> None:
        """Write the drafter as it is to `folder`. tokenizer: digest of the target's; dtype: of the engines."""
        self.trainer.write(folder, tokenizer, dtype)

    def expected(self) -> Expected:
        """What the engine should accept of the drafter as it is, of held-out answers that it gives again."""
        held_out = self.trainer.reproducible()
        walked = self.trainer.acceptance(held_out)
        answers = [(s.token_ids, start, end) for s in map(self.trainer.sequence, held_out) for start, end in s.answers]
        return Expected(
            prompts=[token_ids[:start] for token_ids, start, _ in answers],
            num_new_tokens=[end - start for _, start, end in answers],
            drafts=walked.drafts,
            accepted=walked.accepted,
        )

    def result(self) -> TrainingResult:
        """What training came to."""
        trainer = self.trainer
        return TrainingResult(
            curve=trainer.curve.model_dump(),
            tokens=trainer.tokens,
            draft_vocab_coverage=trainer.coverage,
            expected=self.expected(),
        )
