"""The order in which problems are trained on, and which of them never are."""

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache

from infra.config import rl as settings
from tasks.rl.environments.base import BadEnvironment, Environment, Problem

PATIENCE = 5000
"""Generated problems looked at before a split is called empty."""


class Problems:
    """Training problems, one after the other, and the held-out set.

    A problem is held out when a hash of its question and the seed says so. So the two never share a question, however
    often a generator repeats itself. Environments take turns in proportion to their weights.
    """

    def __init__(
        self,
        configs: Sequence[settings.Environment],
        environments: dict[str, Environment],
        share: float,
        seed: int,
    ):
        self._weights = {config.title: config.weight for config in configs}
        self._environments, self._share, self._seed = environments, share, seed
        self._position = dict.fromkeys(environments, 0)
        self._taken = dict.fromkeys(environments, 0)
        self._order = lru_cache(maxsize=len(configs))(self._make_order)

    def take(self, count: int) -> list[Problem]:
        """The next `count` training problems. Raises BadEnvironment when an environment has none."""
        return [self._next(min(self._weights, key=self._due)) for _ in range(count)]

    def held_out(self, count: int) -> list[Problem]:
        """Up to `count` distinct held-out problems of each environment: fewer where it has fewer.

        Raises BadEnvironment when an environment has none.
        """
        chosen: list[Problem] = []
        for label, environment in self._environments.items():
            found: dict[str, Problem] = {}
            for index in range(environment.size or PATIENCE):
                problem = environment.problem(index)
                if self._is_held_out(problem):
                    found.setdefault(problem.question, problem)
                if len(found) == count:
                    break
            if not found:
                raise BadEnvironment(f"environment {label} has no held-out problem: raise rl.held_out_share")
            chosen += found.values()
        return chosen

    def state(self) -> dict[str, dict[str, int]]:
        """The data cursor: what `restore` needs to go on where this object stands."""
        return {"position": dict(self._position), "taken": dict(self._taken)}

    def restore(self, state: dict[str, dict[str, int]]) -> None:
        """Go on where the object stood whose `state` this is."""
        self._position, self._taken = dict(state["position"]), dict(state["taken"])

    def _due(self, label: str) -> float:
        return (self._taken[label] + 1) / self._weights[label]

    def _next(self, label: str) -> Problem:
        environment = self._environments[label]
        for _ in range(environment.size or PATIENCE):
            problem = environment.problem(self._shuffled(label, self._position[label]))
            self._position[label] += 1
            if not self._is_held_out(problem):
                self._taken[label] += 1
                return problem
        raise BadEnvironment(f"environment {label} has no problem left to train on: lower rl.held_out_share")

    def _shuffled(self, label: str, position: int) -> int:
        """Generators are random already; a file is read in a new seeded order every epoch."""
        size = self._environments[label].size
        if size is None:
            return position
        epoch, place = divmod(position, size)
        return self._order(label, epoch)[place]

    def _make_order(self, label: str, epoch: int) -> list[int]:
        size = self._environments[label].size
        return random.Random(f"{self._seed}:{label}:{epoch}").sample(range(size), size)

    def _is_held_out(self, problem: Problem) -> bool:
        digest = hashlib.blake2b(f"{self._seed}:{problem.question}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._share * 2**64
