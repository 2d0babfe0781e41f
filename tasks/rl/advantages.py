"""Advantage estimators: the rewards of a group become one advantage per rollout."""

from collections.abc import Callable, Sequence

import numpy as np

EPSILON = 1e-6

Estimator = Callable[[np.ndarray], np.ndarray]
"""Rewards of one group [n] -> advantages [n], float64."""


def grpo(rewards: np.ndarray) -> np.ndarray:
    """(R - mean) / (std + 1e-6) with the unbiased standard deviation (Shao et al. 2024, as in verl).

    A group of one keeps its reward: there is nothing to compare it with.
    """
    if len(rewards) == 1:
        return rewards / (1.0 + EPSILON)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """R - mean (Liu et al. 2025): without the division, easy and hard prompts weigh the same.

    A group of one keeps its reward."""
    return rewards - rewards.mean() if len(rewards) > 1 else rewards.copy()


def rloo(rewards: np.ndarray) -> np.ndarray:
    """R_i - mean of the others (Ahmadian et al. 2024). A group of one keeps its reward."""
    n = len(rewards)
    return (rewards - rewards.mean()) * n / (n - 1) if n > 1 else rewards.copy()


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def advantages(name: str, rewards: Sequence[float], groups: Sequence[int]) -> np.ndarray:
    """One advantage per rollout, float64 [n].

    name: a key of ESTIMATORS. rewards, groups: [n], rollouts with the same group number are compared with each other.
    """
    rewards_N, groups_N = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    out_N = np.empty_like(rewards_N)
    for group in np.unique(groups_N):
        members_N = groups_N == group
        out_N[members_N] = ESTIMATORS[name](rewards_N[members_N])
    return out_N
