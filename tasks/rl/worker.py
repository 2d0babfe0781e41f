"""One rank of the trainer as a Ray actor: it holds its share of the policy, and sends it, or the first sends all."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config.rl import RLConfig
from infra.transport.base import Published, Reach, SyncError

if TYPE_CHECKING:
    from tasks.rl.batch import TrainingBatch


class TrainerWorker:
    """base: model folder where the run starts. engine_dtype: the engines' weight type. reach: of the engines. rank: of
    `world`, from 0.

    `begin` comes first: only there is torch imported. Every method but `meet` and `write` is called on all ranks.
    """

    def __init__(self, base: Path, config: RLConfig, engine_dtype: str, reach: Reach, rank: int, world: int):
        self._base, self._config, self._engine_dtype, self._reach = base, config, engine_dtype, reach
        self._rank, self._world = rank, world

    def meet(self) -> str:
        """Where the other ranks find this one, the first."""
        from infra.cluster.ranks import Meeting

        self._meeting = Meeting()
        return self._meeting.address

    def begin(self, meeting: str | None = None) -> None:
        """Load the model, together with the other ranks where the first one has said where to meet.

        Raises TrainerError when it cannot be trained."""
        from infra.cluster.ranks import Meeting, Ranks
        from infra.transport.transports import make_sender
        from tasks.rl.trainer import Trainer

        self._ranks = Ranks(self._rank, self._world)
        if meeting is not None:
            self._ranks.connect(self._meeting.store if self._rank == 0 else Meeting.at(meeting))
        self._trainer = Trainer(self._base, self._config, self._ranks)
        self._sharded = self._config.transport_sharded and self._world > 1
        if self._rank == 0 or self._sharded:
            self._sender = make_sender(self._config.transport, self._engine_dtype, self._reach)

    def step(self, batch: "TrainingBatch") -> dict[str, float]:
        """`Trainer.step`."""
        return self._trainer.step(batch)

    def publish(self, version: int, engines: int) -> Published | None:
        """Offer the current weights as `version` to so many engines. All ranks gather them; the first sends them, or
        each its share.

        Raises SyncError, on every rank that sends, when one of them holds values that are not finite.
        """
        from infra.transport.shares import own

        weights = self._trainer.named_weights()
        if self._sharded:
            mine = own(weights, self._rank, self._world)
            return self._together(lambda: self._sender.publish(version, mine, engines))
        if self._rank == 0:
            return self._sender.publish(version, weights, engines)
        for _ in weights:
            pass
        return None

    def offer(self, engines: int) -> Published | None:
        """Offer the version published last once more."""
        if self._sharded:
            return self._together(lambda: self._sender.offer(engines))
        return self._sender.offer(engines) if self._rank == 0 else None

    def _together(self, publish: Callable[[], Published]) -> Published | None:
        """What all ranks publish as one, on the first."""
        from infra.transport.shares import joined

        try:
            mine: Published | SyncError = publish()
        except SyncError as error:
            mine = error  # the others wait to hear of it
        shares = self._ranks.collect(mine)
        for share in shares:
            if isinstance(share, SyncError):
                raise share
        return joined(shares) if self._rank == 0 else None

    def snapshot(self) -> None:
        """Copy the state for `write`."""
        from tasks.rl import trainer_state

        self._snapshot = trainer_state.snapshot(self._trainer)

    def write(self, folder: Path) -> None:
        """Write the last snapshot, this rank's part of a checkpoint, into `folder`; training may go on meanwhile."""
        from tasks.rl import trainer_state

        snapshot, self._snapshot = self._snapshot, None
        trainer_state.write(snapshot, folder)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint that `write` wrote."""
        from tasks.rl import trainer_state

        trainer_state.load(self._trainer, folder)

    def export(self, folder: Path) -> None:
        """Write the policy into the new `folder` as a Hugging Face model."""
        from tasks.rl import trainer_state

        trainer_state.export(self._trainer, self._base, folder)

    def close(self) -> None:
        """Free what was published."""
        if self._rank == 0 or self._sharded:
            self._sender.close()
