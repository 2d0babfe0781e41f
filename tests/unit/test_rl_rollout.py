"""Staleness: what may be sampled when, and what may be trained on."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rl.environments.base import Problem
from tasks.rl.rollout import Group, Rollout, admit, sample_seed, together
from tasks.rl.schedule import Schedule

PROBLEM = Problem("sums", 0, ({"role": "user", "content": "1 + 1"},), "2")


def rollout(*versions: tuple[int, int, int], reward: float | None = 1.0) -> Rollout:
    count = versions[-1][2]
    return Rollout(PROBLEM, 0, [1], [2] * count, [-1.0] * count, list(versions), "stop", "2", reward)


def test_a_rollout_is_as_stale_as_its_oldest_token():
    mixed, fresh = rollout((3, 0, 4), (5, 4, 9)), rollout((5, 0, 2))
    admitted = admit([Group(PROBLEM, [mixed, fresh, fresh])], version=5, max_staleness=1)
    assert (admitted.stale, admitted.staleness, len(admitted.groups[0].rollouts)) == (1, [0, 0], 2)
    admitted = admit([Group(PROBLEM, [mixed, fresh, fresh])], version=5, max_staleness=2)
    assert (admitted.stale, admitted.staleness) == (0, [2, 0, 0])


def test_failed_scores_cost_their_rollout_and_lonely_groups_are_left_out():
    good, failed = rollout((0, 0, 2)), rollout((0, 0, 2), reward=None)
    groups = [Group(PROBLEM, [good, failed, good]), Group(PROBLEM, [good, failed]), Group(PROBLEM, [failed])]
    admitted = admit(groups, version=0, max_staleness=0)
    assert (admitted.failed, admitted.lonely, [len(g.rollouts) for g in admitted.groups]) == (3, 2, [2])
    assert len(admit([Group(PROBLEM, [good])], version=0, max_staleness=0).groups) == 1  # a group of one on purpose


@given(
    max_staleness=st.integers(0, 3),
    steps=st.integers(1, 8),
    delays=st.lists(st.integers(0, 6), min_size=16, max_size=16),
)
def test_no_step_is_trained_on_rollouts_older_than_the_bound(max_staleness, steps, delays):
    """Whatever the timing: rollouts begin in order and never earlier than the bound allows."""

    async def run():
        current, begun = 0, []

        async def sample(step):
            begun.append((step, current))
            oldest = current
            for _ in range(delays[step]):
                await asyncio.sleep(0)
            return [Group(PROBLEM, [rollout((oldest, 0, 1), (max(oldest, current), 1, 2))])]

        async with Schedule(sample, 0, steps, max_staleness) as schedule:
            schedule.published(0)
            for step in range(steps):
                groups = await schedule.rollouts(step)
                admitted = admit(groups, version=step, max_staleness=max_staleness)
                assert admitted.stale == 0
                for _ in range(delays[8 + step]):
                    await asyncio.sleep(0)
                current = step + 1
                schedule.published(current)
        assert [step for step, _ in begun] == list(range(steps))
        for step, version in begun:
            assert max(0, step - max_staleness) <= version <= step

    asyncio.run(run())


def test_an_error_in_a_rollout_ends_the_others():
    async def run():
        ended = []

        async def endless():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def broken():
            raise KeyError("broken")

        with pytest.raises(KeyError, match="broken"):
            await together([endless(), endless(), broken()])
        return ended

    assert asyncio.run(run()) == [True, True]


def test_every_sample_has_its_own_seed():
    seeds = {sample_seed(0, step, place, sample) for step in range(5) for place in range(5) for sample in range(5)}
    assert len(seeds) == 125 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 2, 3) != sample_seed(1, 1, 2, 3)
