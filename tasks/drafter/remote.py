"""The trainer of drafters as its steps see it: one worker, whose work so many ranks do in processes of their own."""

from typing import Any

from infra.cluster.session import session
from infra.config.flows import DrafterFlowConfig
from tasks.drafter.serving import placement
from tasks.drafter.worker import TrainerWorker


class RemoteWorker:
    """`cluster.trainer_ranks` actors, which begin at once with imports that take as long as an engine's start."""

    def __init__(self, config: DrafterFlowConfig):
        self._config = config
        self._start()

    def look_after(self) -> None:
        """Start all ranks anew where one has died, as it may have when a step is tried again."""
        from ray.exceptions import RayActorError

        try:
            session().results([actor.__ray_ready__.remote() for actor in self._actors])
        except RayActorError:
            self._actors, self._warm = [], []  # nobody else knows them: their devices are free for the next
            self._start()

    def _start(self) -> None:
        where, ranks = placement(self._config), self._config.cluster.trainer_ranks
        self._actors = [
            session().actor(
                TrainerWorker,
                rank,
                ranks,
                cpus=where.trainer.cpus,
                gpus=where.trainer.gpus,
                threads=where.trainer_threads,
            )
            for rank in range(ranks)
        ]
        meeting = [self._actors[0].meet.remote()] if ranks > 1 else []
        self._warm = [actor.warm_up.remote(*meeting) for actor in self._actors]

    def begin(self, method: str, *args: Any) -> list[Any]:
        """Ask every rank for a method of `TrainerWorker`."""
        return [getattr(actor, method).remote(*args) for actor in self._actors]

    def wait(self, begun: list[Any]) -> Any:
        """What the first rank returned, once all have. Raises what any rank raised, at once: the others may be waiting
        for it."""
        return session().results([*self._warm, *begun])[len(self._warm)]

    def do(self, method: str, *args: Any) -> Any:
        """`begin` and `wait`."""
        return self.wait(self.begin(method, *args))
