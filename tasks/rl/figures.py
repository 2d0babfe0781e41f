"""One row of figures per step, and the rollouts that people browse."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from infra.config.rl import RLConfig
from infra.transport.base import Published
from infra.transport.sync import SyncReport
from tasks.rl.advantages import advantages
from tasks.rl.batch import TrainingBatch, TrainingGroup
from tasks.rl.rollout import Admitted, Group, Rollout, browsable
from tasks.rl.rounds import Collected

BROWSED = 64
"""Rollouts of a step that are kept for reading."""


def credit(groups: Sequence[Group], config: RLConfig) -> list[list[float]]:
    """Advantage of each rollout of each group, of its reward less what its length costs."""
    rollouts = [r for group in groups for r in group.rollouts]
    rewards = [r.reward - overlong(sum(r.own), config) for r in rollouts]
    numbers = [number for number, group in enumerate(groups) for _ in group.rollouts]
    values = iter(advantages(config.advantage, rewards, numbers).tolist())
    return [[next(values) for _ in group.rollouts] for group in groups]


def overlong(length: int, config: RLConfig) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): 0 up to `max_new_tokens - overlong_buffer` tokens,
    from there rising linearly to `overlong_penalty` at `max_new_tokens`."""
    if not config.overlong_buffer:
        return 0.0
    over = length - (config.max_new_tokens - config.overlong_buffer)
    return config.overlong_penalty * min(1.0, max(0.0, over / config.overlong_buffer))


def to_batch(
    groups: Sequence[Group], credits: Sequence[Sequence[float]], temperature: float, longest: int
) -> TrainingBatch:
    """The admitted groups with their advantages, as the trainer wants them.

    Rollouts of one group whose prompts differ (episodes whose environment words it anew) share the advantage's
    baseline, and are given to the trainer under a prompt each.
    """
    batch = []
    for group, values in zip(groups, credits, strict=True):
        by_prompt: dict[tuple[int, ...], list[tuple[Rollout, float]]] = {}
        for rollout, value in zip(group.rollouts, values, strict=True):
            by_prompt.setdefault(tuple(rollout.prompt_ids), []).append((rollout, value))
        for prompt, rows in by_prompt.items():
            batch.append(
                TrainingGroup(
                    np.asarray(prompt, dtype=np.int64),
                    [np.asarray(r.token_ids, dtype=np.int64) for r, _ in rows],
                    [np.asarray(r.logprobs, dtype=np.float64) for r, _ in rows],
                    [value for _, value in rows],
                    [np.asarray(r.own, dtype=bool) for r, _ in rows],
                )
            )
    return TrainingBatch(batch, temperature, longest)


def rollout_figures(collected: Collected, admitted: Admitted) -> dict[str, float]:
    """Rewards, lengths and what was left out. Rewards are of all rollouts that were scored, lengths of all, in tokens.

    solved: share with full reward. tokens: the policy's own. truncated: share cut off by the length limit. flat_groups:
    share of the groups trained on whose rewards are all equal, so that nothing is learned from them. turns_mean,
    rewritten: of episodes, see `Rollout`. stale, failed, lonely_groups: see `admit`. *_groups: see `Collected`.
    """
    groups = [*collected.groups, *collected.left]
    rollouts = [r for group in groups for r in group.rollouts]
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [r.reward for r in scored]
    lengths = [sum(r.own) for r in rollouts]
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
        "turns_mean": _mean([r.turns for r in rollouts]),
        "rewritten": float(sum(r.rewritten for r in rollouts)),
        "flat_groups": _mean(flat),
        "groups": float(len(collected.groups)),
        "filtered_groups": float(collected.filtered),
        "surplus_groups": float(collected.surplus),
        "expired_groups": float(collected.expired),
        "cut_groups": float(collected.cut),
        "carried_groups": float(collected.carried),
        "stale": float(admitted.stale),
        "failed": float(admitted.failed),
        "lonely_groups": float(admitted.lonely),
        "staleness_mean": _mean(admitted.staleness),
        "staleness_max": float(max(admitted.staleness, default=0)),
    }


def times(row: Mapping[str, float], *, rollout_s: float, waited_s: float, step_s: float) -> dict[str, float]:
    """Where the time of a step went, seconds and shares. rollout_s: from the first to the last token of its round.

    waited_s: the trainer for rollouts. row: its `tokens`, `engine_busy_s` and `sync_s`.
    """
    return {
        "rollout_s": rollout_s,
        "waited_for_rollouts_s": waited_s,
        "tokens_per_second": row["tokens"] / rollout_s,
        "step_s": step_s,
        "engine_idle_share": max(0.0, 1 - row["engine_busy_s"] / step_s),
        "trainer_idle_share": (waited_s + row["sync_s"]) / step_s,
    }


def sync_figures(published: Published, synced: SyncReport | None) -> dict[str, float]:
    """An update in parts, seconds and bytes; NaN where no engine was left to take it. sync_s: the trainer waits."""
    told = synced.model_dump() if synced else {}
    parts = ("prepare_s", "pause_s", "transfer_s", "finalize_s", "verify_s", "bytes")
    row = {name: float(told.get(name, "nan")) for name in parts}
    row["sync_bytes"], row["sync_s"] = row.pop("bytes"), row.pop("prepare_s") + row["pause_s"]
    return row | {"publish_s": published.publish_s}


def write_rollouts(
    path: Path, step: int, collected: Collected, admitted: Admitted, credits: Sequence[Sequence[float]]
) -> None:
    """Write the first rollouts of a step as JSON lines; advantage null for those that it was not trained on."""
    groups = [*collected.groups, *collected.left]
    advantage = {
        id(rollout): value
        for group, values in zip(admitted.groups, credits, strict=True)
        for rollout, value in zip(group.rollouts, values, strict=True)
    }
    rollouts = [r for group in groups for r in group.rollouts][:BROWSED]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(browsable(r, step=step, advantage=advantage.get(id(r)))) + "\n" for r in rollouts)
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
