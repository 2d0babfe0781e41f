"""The trainer as a run sees it: one object, whose work so many ranks do in processes of their own."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.cluster.placement import Placement
from infra.cluster.session import session
from infra.config.rl import RLConfig
from infra.transport.base import Published, Reach
from tasks.rl.errors import TrainerError
from tasks.rl.worker import TrainerWorker

if TYPE_CHECKING:
    from tasks.rl.batch import TrainingBatch


class RemoteTrainer:
    """`ranks` actors, placed as `where` says, which begin at once to load the model in `base`.

    engine_dtype: the engines' weight type. reach: how their weights reach them. Every method raises what a rank raised,
    without Ray's wrapping, and TrainerError when a rank's process has died.
    """

    def __init__(self, base: Path, config: RLConfig, engine_dtype: str, reach: Reach, where: Placement, ranks: int):
        self._actors = [
            session().actor(
                TrainerWorker,
                base,
                config,
                engine_dtype,
                reach,
                rank,
                ranks,
                cpus=where.trainer.cpus,
                gpus=where.trainer.gpus,
                threads=where.trainer_threads,
                aside=1,
            )
            for rank in range(ranks)
        ]
        meeting = [self._actors[0].meet.remote()] if ranks > 1 else []
        self._begun = [actor.begin.remote(*meeting) for actor in self._actors]

    async def ready(self) -> None:
        """Wait until the model is loaded. Raises TrainerError when it cannot be trained."""
        await _all(self._begun)

    async def step(self, batch: "TrainingBatch") -> dict[str, float]:
        """`Trainer.step`."""
        import ray

        shared = ray.put(batch)
        return (await _all([actor.step.remote(shared) for actor in self._actors]))[0]

    async def publish(self, version: int, engines: int) -> Published:
        """Offer the current weights as `version` to so many engines."""
        return (await _all([actor.publish.remote(version, engines) for actor in self._actors]))[0]

    async def offer(self, engines: int) -> Published:
        """Offer the version published last to so many engines again."""
        return (await _all([actor.offer.remote(engines) for actor in self._actors]))[0]

    async def snapshot(self) -> None:
        """Copy the state for `write`, in the memory of each rank's host."""
        await _all([actor.snapshot.remote() for actor in self._actors])

    async def write(self, folder: Path) -> None:
        """Write the last snapshot into `folder`. Beside it the ranks go on with what they are asked for."""
        await _all([actor.write.options(concurrency_group="aside").remote(folder) for actor in self._actors])

    async def load(self, folder: Path) -> None:
        """Restore what `write` wrote, whatever number of ranks it was written by."""
        await _all([actor.load.remote(folder) for actor in self._actors])

    async def export(self, folder: Path) -> None:
        """Write the policy into the new `folder` as a Hugging Face model."""
        await _all([actor.export.remote(folder) for actor in self._actors])

    async def close(self) -> None:
        """Free what was published."""
        await _all([actor.close.remote() for actor in self._actors])


async def _all(references: Sequence[Any]) -> list[Any]:
    """Results of all ranks. The first error is raised at once: the others may be waiting for the rank it came from."""
    return await asyncio.gather(*(_done(reference) for reference in references))


async def _done(reference: Any) -> Any:
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise TrainerError(
            "the trainer's process has died, for want of memory perhaps: run again to go on from the last checkpoint"
        ) from error
