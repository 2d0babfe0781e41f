"""What of the rollouts may be trained on, and what their length costs."""

import asyncio

import pytest

from infra.config.rl import RLConfig
from tasks.rl.environments.base import Problem
from tasks.rl.figures import credit, overlong, to_batch
from tasks.rl.packing import pack
from tasks.rl.rollout import Group, Rollout, admit, sample_seed, together

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


def test_the_last_part_of_the_allowed_length_costs_reward():
    config = RLConfig(max_new_tokens=10, overlong_buffer=4, overlong_penalty=0.5, advantage="dr_grpo")
    assert [overlong(length, config) for length in (1, 6, 7, 8, 10)] == [0, 0, 0.125, 0.25, 0.5]
    assert overlong(10, RLConfig(max_new_tokens=10)) == 0
    short, long = rollout((0, 0, 2)), rollout((0, 0, 10))
    assert credit([Group(PROBLEM, [short, long])], config) == [[0.25, -0.25]]


def test_only_the_tokens_of_the_policy_are_trained_on():
    """An episode: three own tokens, two of a user, one own; its group's other rollout was asked in other words."""
    episode = Rollout(PROBLEM, 0, [1], [5, 6, 7, 8, 9, 4], [-1.0] * 6, [(2, 0, 3), (3, 5, 6)], "stop", "", 1.0)
    other = Rollout(PROBLEM, 1, [2], [5], [-1.0], [(3, 0, 1)], "stop", "", 0.0)
    assert episode.own == [True, True, True, False, False, True] and episode.oldest_version == 2
    batch = to_batch([Group(PROBLEM, [episode, other])], [[0.5, -0.5]], 1.0, 8)
    assert [group.prompt_ids.tolist() for group in batch.groups] == [[1], [2]]
    assert [group.advantages for group in batch.groups] == [[0.5], [-0.5]]
    (micro,) = pack(batch.groups, 64)
    assert sorted(micro.target_N.tolist()) == [4, 5, 5, 6, 7]
    assert micro.input_T.tolist().count(9) == 1  # what the user said is read
