"""One row of figures per step, and the rollouts that people browse."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tasks.rl.advantages import advantages
from tasks.rl.batch import TrainingBatch, TrainingGroup
from tasks.rl.rollout import Admitted, Group, browsable

BROWSED = 64
"""Rollouts of a step that are kept for reading."""


def to_batch(groups: Sequence[Group], estimator: str, temperature: float, longest: int) -> TrainingBatch:
    """The admitted groups with the advantages of `estimator`, as the trainer wants them."""
    rollouts = [r for group in groups for r in group.rollouts]
    numbers = [number for number, group in enumerate(groups) for _ in group.rollouts]
    advantage = iter(advantages(estimator, [r.reward for r in rollouts], numbers).tolist())
    return TrainingBatch(
        [
            TrainingGroup(
                np.asarray(group.rollouts[0].prompt_ids, dtype=np.int64),
                [np.asarray(r.token_ids, dtype=np.int64) for r in group.rollouts],
                [np.asarray(r.logprobs, dtype=np.float64) for r in group.rollouts],
                [next(advantage) for _ in group.rollouts],
            )
            for group in groups
        ],
        temperature,
        longest,
    )


def rollout_figures(groups: Sequence[Group], admitted: Admitted) -> dict[str, float]:
    """Rewards, lengths and what was left out. Rewards are of all rollouts that were scored, lengths of all, in tokens.

    solved: share with full reward. truncated: share cut off by the length limit. flat_groups: share of groups whose
    rewards are all equal, so that nothing is learned from them. stale, failed, lonely_groups: see `admit`.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [r.reward for r in scored]
    lengths = [len(r.token_ids) for r in rollouts]
    flat = [len({r.reward for r in group.rollouts}) == 1 for group in admitted.groups]
    environments = sorted({r.problem.environment for r in scored})
    return {
        "reward_mean": _mean(rewards),
        **{f"reward_{e}": _mean([r.reward for r in scored if r.problem.environment == e]) for e in environments},
        "solved": _mean([reward >= 1 for reward in rewards]),
        "rollouts": float(len(rollouts)),
        "tokens": float(sum(lengths)),
        "length_mean": _mean(lengths),
        "length_p90": float(np.quantile(lengths, 0.9)),
        "length_max": float(max(lengths)),
        "truncated": _mean([r.finish_reason == "length" for r in rollouts]),
        "flat_groups": _mean(flat),
        "stale": float(admitted.stale),
        "failed": float(admitted.failed),
        "lonely_groups": float(admitted.lonely),
        "staleness_mean": _mean(admitted.staleness),
        "staleness_max": float(max(admitted.staleness, default=0)),
    }


def write_rollouts(path: Path, step: int, groups: Sequence[Group], batch: TrainingBatch, admitted: Admitted) -> None:
    """Write the first rollouts of a step as JSON lines; advantage null for those that were not admitted."""
    advantage = {
        id(rollout): value
        for group, trained in zip(admitted.groups, batch.groups, strict=True)
        for rollout, value in zip(group.rollouts, trained.advantages, strict=True)
    }
    rollouts = [r for group in groups for r in group.rollouts][:BROWSED]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(browsable(r, step=step, advantage=advantage.get(id(r)))) + "\n" for r in rollouts)
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
