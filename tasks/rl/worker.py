"""The trainer as a Ray actor: it holds the policy and sends its weights."""

from pathlib import Path

from infra.config.rl import RLConfig
from infra.transport.base import Published
from infra.transport.shm import ShmSender
from tasks.rl import trainer_state
from tasks.rl.batch import TrainingBatch
from tasks.rl.trainer import Trainer

SENDERS = {"shm": ShmSender}


class TrainerWorker:
    """One trainer rank. base: model folder where the run starts. engine_dtype: the engines' weight type."""

    def __init__(self, base: Path, config: RLConfig, engine_dtype: str):
        self._base = base
        self._trainer = Trainer(base, config)
        self._sender = SENDERS[config.transport](engine_dtype)

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """`Trainer.step`."""
        return self._trainer.step(batch)

    def publish(self, version: int) -> Published:
        """Offer the current weights to the engines as `version`."""
        return self._sender.publish(version, self._trainer.named_weights())

    def save(self, folder: Path) -> None:
        """Write the trainer's part of a checkpoint into `folder`."""
        trainer_state.save(self._trainer, folder)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint that `save` wrote."""
        trainer_state.load(self._trainer, folder)

    def export(self, folder: Path) -> None:
        """Write the policy into the new `folder` as a Hugging Face model."""
        trainer_state.export(self._trainer, self._base, folder)

    def close(self) -> None:
        """Free what was published."""
        self._sender.close()
