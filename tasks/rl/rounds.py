"""Which groups are sampled when, and which of them a step is trained on.

The groups of round t are begun for step t. With over-sampling, filtering and stragglers that are cut or carried, a step
may be trained on fewer of them, on more that were begun later, and on some that an earlier round left.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from infra.config.rl import RLConfig
from tasks.rl.environments.base import Environment, Problem
from tasks.rl.environments.problems import Problems
from tasks.rl.journal import Journal, restored
from tasks.rl.rollout import Group, admit

Key = tuple[int, int]  # round, place in it
Sample = Callable[[int, int, Problem], Awaitable[Group]]


@dataclass
class Collected:
    """What a step gets. groups: to train on. left: finished groups that it is not trained on.

    filtered: groups whose rewards were all equal. surplus: finished beyond what the step takes, dropped. expired: left
    by an earlier round and too old by now. cut, carried: groups that had not all finished, given up or taken along.
    """

    groups: list[Group]
    left: list[Group] = field(default_factory=list)
    filtered: int = 0
    surplus: int = 0
    expired: int = 0
    cut: int = 0
    carried: int = 0


class Rounds:
    """Rounds `first` to `last - 1`, begun as versions are published; an async context manager.

    Version v is what the trainer has after v steps, and step t is trained by version t. Round t begins once version
    t - `max_staleness` is in the engines, so that no token of it is older than that when step t is trained; where
    stragglers are carried it begins one version later, since then step t + 1 may be trained on what it leaves.

    sample(step, place, problem): makes a group. A group that finishes is in `journal` before anybody waits for it.
    """

    def __init__(
        self,
        sample: Sample,
        problems: Problems,
        environments: dict[str, Environment],
        journal: Journal,
        config: RLConfig,
        first: int,
    ):
        self._sample, self._problems, self._environments, self._journal = sample, problems, environments, journal
        self._config, self._next = config, first
        self._ahead = config.max_staleness - (config.stragglers == "carry")
        self._size = math.ceil(config.prompts_per_step * config.oversampling)
        self._limit = max(self._size, math.ceil(config.prompts_per_step * config.filter_limit))
        self._open: dict[Key, asyncio.Future[Group]] = {}
        self._begun: dict[int, int] = {}
        self._known: dict[int, Any] = {}

    async def __aenter__(self) -> "Rounds":
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._open.values():
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    def state(self, version: int) -> dict[str, Any]:
        """What `restore` needs beside the journal: the data cursor, and what rounds before `version` left."""
        return {
            "problems": self._problems.state(),
            "carried": [list(key) for key in self._open if key[0] < version],
        }

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Go on after a run that was killed once version `version` was kept: its finished groups are used, what it had
        begun is begun again with the same problems."""
        cursors = [state["problems"]]
        for number in self._journal.rounds():
            known = self._journal.read(number)
            cursors += [known.cursor] if known.cursor else []
            if number >= version:
                self._known[number] = known
                continue
            for key in map(tuple, state["carried"]):
                if key[0] == number:
                    self._resume(key, known)
        self._problems.restore(max(cursors, key=lambda c: sum(c["position"].values())))

    def published(self, version: int) -> None:
        """The engines have the weights of `version`: begin what that allows, in the order of rounds."""
        while self._next < self._config.steps and self._next - self._ahead <= version:
            number, known = self._next, self._known.pop(self._next, None)
            self._next += 1
            self._begun[number] = 0
            for place in known.problems if known else ():
                self._resume((number, place), known)
                self._begun[number] += 1
            self._begin(number, self._size - self._begun[number])

    async def collect(self, step: int) -> Collected:
        """Wait until step `step` has what it is trained on. Raises what a rollout raised."""
        config, wanted = self._config, self._config.prompts_per_step
        while True:
            mine = {key: task for key, task in self._open.items() if key[0] <= step}
            finished = {key: task.result() for key, task in mine.items() if task.done()}
            waiting = [task for task in mine.values() if not task.done()]
            kinds = {key: self._kind(group, step) for key, group in finished.items()}
            good = [key for key in finished if kinds[key] == "good"]
            enough = len(good) >= wanted
            if enough and (not waiting or config.stragglers != "wait"):
                break
            if not waiting:
                missing = min(wanted - len(good), self._limit - self._begun[step])
                if not config.filter_groups or missing < 1:
                    break
                self._begin(step, missing)
                continue
            everyone = config.stragglers == "wait"
            await asyncio.wait(waiting, return_when="FIRST_EXCEPTION" if everyone else "FIRST_COMPLETED")
        return await self._settle(step, finished, kinds, good[:wanted])

    def forget(self, version: int) -> None:
        """A checkpoint of `version` is kept: what no resumed run can need is deleted."""
        self._journal.forget(version - self._config.max_staleness - 1)

    def _kind(self, group: Group, step: int) -> str:
        admitted = admit([group], version=step, max_staleness=self._config.max_staleness)
        if admitted.stale and not admitted.groups:
            return "expired"
        if self._config.filter_groups and len({r.reward for g in admitted.groups for r in g.rollouts}) < 2:
            return "filtered"
        return "good"

    async def _settle(
        self, step: int, finished: dict[Key, Group], kinds: dict[Key, str], chosen: list[Key]
    ) -> Collected:
        config = self._config
        collected = Collected([finished[key] for key in chosen])
        keep = config.stragglers == "carry" and step + 1 < config.steps
        cut = []
        for key in [key for key in self._open if key[0] <= step]:
            kind = kinds.get(key, "unfinished")
            if keep and key not in chosen and (kind == "unfinished" or (kind == "good" and key[0] == step)):
                collected.carried += kind == "unfinished"
                continue
            task = self._open.pop(key)
            if key in chosen:
                continue
            if kind == "unfinished":
                cut.append(task)
                task.cancel()
                continue
            collected.left.append(finished[key])
            collected.filtered += kind == "filtered"
            collected.expired += kind == "expired"
            collected.surplus += kind == "good"
        collected.cut = len(cut)
        await asyncio.gather(*cut, return_exceptions=True)
        return collected

    def _begin(self, number: int, count: int) -> None:
        if count < 1:
            return
        start = self._begun[number]
        chosen = list(enumerate(self._problems.take(count), start=start))
        self._begun[number] += count
        self._journal.begin(number, chosen, self._problems.state())
        for place, problem in chosen:
            self._open[number, place] = asyncio.ensure_future(self._group(number, place, problem))

    def _resume(self, key: Key, known: Any) -> None:
        number, place = key
        environment, index = known.problems[place]
        problem = self._environments[environment].problem(index)
        if place in known.groups:
            self._open[key] = asyncio.get_running_loop().create_future()
            self._open[key].set_result(restored(problem, known.groups[place]))
        else:
            self._open[key] = asyncio.ensure_future(self._group(number, place, problem))

    async def _group(self, number: int, place: int, problem: Problem) -> Group:
        group = await self._sample(number, place, problem)
        self._journal.finish(number, place, group)
        return group
