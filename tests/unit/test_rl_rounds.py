"""Rounds: what is sampled when, what a step is trained on, and what a killed run finds again."""

import asyncio
import json
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.config.rl import JsonlEnvironment, RLConfig
from tasks.rl.environments.make import make
from tasks.rl.environments.problems import Problems
from tasks.rl.journal import Journal
from tasks.rl.rollout import Group, Rollout, admit
from tasks.rl.rounds import Rounds


class Engines:
    """Stands for engines whose timing is random: a group takes some turns of the event loop, its first token is
    of the version it began under, its last of the one it ended under."""

    def __init__(self, seed: int, flat_share: float):
        self.version, self._random, self._flat_share = 0, random.Random(seed), flat_share
        self.begun: dict[tuple[int, int], int] = {}
        self.unfinished: set[tuple[int, int]] = set()

    async def pause(self) -> None:
        for _ in range(self._random.choice([0, 0, 1, 2, 5, 20])):
            await asyncio.sleep(0)

    async def group(self, number: int, place: int, problem) -> Group:
        assert (number, place) not in self.begun
        self.begun[number, place] = oldest = self.version
        if (number, place) in self.unfinished:
            await asyncio.Event().wait()
        await self.pause()
        rewards = [1.0, 1.0] if self._random.random() < self._flat_share else [0.0, 1.0]
        spans = [(oldest, 0, 1), (self.version, 1, 2)]
        return Group(
            problem,
            [Rollout(problem, n, [1], [2, 3], [-1.0, -0.5], spans, "stop", "", r) for n, r in enumerate(rewards)],
        )


def rounds(folder: Path, engines: Engines, config: RLConfig, first: int = 0) -> Rounds:
    environments = make(config.environments, config.seed)
    problems = Problems(config.environments, environments, config.held_out_share, config.seed)
    made = Rounds(engines.group, problems, environments, Journal(folder / "groups"), config, first)
    made.restore({"problems": problems.state(), "carried": []}, 0)
    return made


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(200)))
    return path


def configured(prompts: Path, **rl) -> RLConfig:
    environment = JsonlEnvironment(path=str(prompts), scorer="tests.unit.scorers:exact")
    return RLConfig(environments=[environment], prompts_per_step=3, group_size=2, **rl)


@settings(deadline=None, max_examples=150)
@given(
    max_staleness=st.integers(0, 3),
    stragglers=st.sampled_from(["wait", "cut", "carry"]),
    oversampling=st.sampled_from([1.0, 1.5, 2.0]),
    filter_groups=st.booleans(),
    steps=st.integers(1, 7),
    seed=st.integers(0, 2**32),
)
def test_no_step_is_trained_on_rollouts_older_than_the_bound(
    prompts, max_staleness, stragglers, oversampling, filter_groups, steps, seed
):
    """Whatever the timing and the policy: the bound holds for every token, and no group is trained on twice."""
    if stragglers == "carry":
        max_staleness = max(1, max_staleness)
    config = configured(
        prompts,
        max_staleness=max_staleness,
        stragglers=stragglers,
        oversampling=oversampling,
        filter_groups=filter_groups,
        steps=steps,
        filter_limit=3.0,
    )

    async def run(folder: Path) -> None:
        engines, trained = Engines(seed, flat_share=0.3), []
        async with rounds(folder, engines, config) as source:
            source.published(0)
            for step in range(steps):
                collected = await source.collect(step)
                admitted = admit(collected.groups, version=step, max_staleness=max_staleness)
                assert admitted.stale == 0
                assert len(collected.groups) <= 3
                if filter_groups:
                    assert all(len({r.reward for r in group.rollouts}) == 2 for group in collected.groups)
                elif stragglers == "wait":
                    assert len(collected.groups) == 3
                trained += [group.problem.index for group in collected.groups]
                await engines.pause()
                engines.version = step + 1
                source.published(step + 1)
        assert len(set(trained)) == len(trained)
        for (number, _), version in engines.begun.items():
            assert version >= number - max_staleness

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


def test_a_killed_run_samples_no_finished_group_again_and_begins_what_had_not_finished(prompts, tmp_path):
    config = configured(prompts, max_staleness=2, steps=6)

    async def killed() -> tuple[dict, dict]:
        engines = Engines(0, flat_share=0.0)
        engines.unfinished = {(2, 1), (3, 0)}
        async with rounds(tmp_path, engines, config) as source:
            source.published(0)
            await source.collect(0)
            engines.version = 1
            source.published(1)
            state = json.loads(json.dumps(source.state(1)))  # the checkpoint of version 1
            await source.collect(1)
            for _ in range(100):  # all that can finish does
                await asyncio.sleep(0)
        return state, engines.begun

    state, begun = asyncio.run(killed())
    assert set(begun) == {(number, place) for number in range(4) for place in range(3)}
    torn = tmp_path / "groups" / "round-000003.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"place": 2, "rollo')

    async def resumed() -> tuple[list[list[int]], dict]:
        engines, problems = Engines(1, flat_share=0.0), []
        engines.version = 1
        async with rounds(tmp_path, engines, config, first=1) as source:
            source.restore(state, 1)
            source.published(1)
            for step in range(1, 6):
                problems.append([group.problem.index for group in (await source.collect(step)).groups])
                engines.version = step + 1
                source.published(step + 1)
        return problems, engines.begun

    problems, begun = asyncio.run(resumed())
    again = {key for key in begun if key[0] < 4}
    assert again == {(2, 1), (3, 0)}

    async def unbroken() -> list[list[int]]:
        found, engines = [], Engines(2, flat_share=0.0)
        async with rounds(tmp_path / "unbroken", engines, config) as source:
            source.published(0)
            for step in range(6):
                found.append([group.problem.index for group in (await source.collect(step)).groups])
                engines.version = step + 1
                source.published(step + 1)
        return found

    assert problems == asyncio.run(unbroken())[1:]


def test_stragglers_are_cut_or_go_on_in_the_next_step(prompts, tmp_path):
    async def two_steps(name: str, **rl):
        engines = Engines(0, flat_share=0.0)
        config = configured(prompts, steps=2, oversampling=1.3, max_staleness=1, **rl)
        engines.unfinished = {(0, 1)}
        async with rounds(tmp_path / name, engines, config) as source:
            source.published(0)
            first = await source.collect(0)
            engines.version = 1
            source.published(1)
            carried = source.state(1)["carried"]
            return first, carried

    first, carried = asyncio.run(two_steps("cut", stragglers="cut"))
    assert (first.cut, first.carried, carried, len(first.groups)) == (1, 0, [], 3)
    first, carried = asyncio.run(two_steps("carry", stragglers="carry"))
    assert (first.cut, first.carried, carried, len(first.groups)) == (0, 1, [[0, 1]], 3)


def test_a_step_makes_do_with_fewer_groups_once_the_limit_is_reached(prompts, tmp_path):
    async def step():
        engines = Engines(0, flat_share=1.0)
        config = configured(prompts, steps=1, filter_groups=True, filter_limit=2.0)
        async with rounds(tmp_path, engines, config) as source:
            source.published(0)
            return await source.collect(0), len(engines.begun)

    collected, begun = asyncio.run(step())
    assert (len(collected.groups), collected.filtered, begun) == (0, 6, 6)
