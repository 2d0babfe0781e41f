"""The trainer as a Ray actor: it holds the policy and sends its weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.config.rl import RLConfig
from infra.transport.base import Published
from tasks.rl.errors import TrainerError

if TYPE_CHECKING:
    from tasks.rl.batch import TrainingBatch


class TrainerWorker:
    """One trainer. base: model folder where the run starts. engine_dtype: the engines' weight type.

    `begin` comes first: only there is torch imported."""

    def __init__(self, base: Path, config: RLConfig, engine_dtype: str):
        self._base, self._config, self._engine_dtype = base, config, engine_dtype

    def begin(self) -> None:
        """Load the model. Raises TrainerError when it cannot be trained."""
        from infra.transport.senders import make_sender
        from tasks.rl.trainer import Trainer

        self._trainer = Trainer(self._base, self._config)
        self._sender = make_sender(self._config.transport, self._engine_dtype)

    def step(self, batch: "TrainingBatch") -> dict[str, float]:
        """`Trainer.step`."""
        return self._trainer.step(batch)

    def publish(self, version: int) -> Published:
        """Offer the current weights to the engines as `version`."""
        return self._sender.publish(version, self._trainer.named_weights())

    def save(self, folder: Path) -> None:
        """Write the trainer's part of a checkpoint into `folder`."""
        from tasks.rl import trainer_state

        trainer_state.save(self._trainer, folder)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint that `save` wrote."""
        from tasks.rl import trainer_state

        trainer_state.load(self._trainer, folder)

    def export(self, folder: Path) -> None:
        """Write the policy into the new `folder` as a Hugging Face model."""
        from tasks.rl import trainer_state

        trainer_state.export(self._trainer, self._base, folder)

    def close(self) -> None:
        """Free what was published."""
        self._sender.close()


async def done(reference: Any) -> Any:
    """The result of a remote call, or the worker's own exception without Ray's wrapping.

    Raises TrainerError when the worker's process has died.
    """
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise TrainerError(
            "the trainer's process has died, for want of memory perhaps: run again to go on from the last checkpoint"
        ) from error
