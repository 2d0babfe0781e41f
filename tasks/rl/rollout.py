"""Rollouts, and which of them a step may be trained on."""

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from tasks.rl.environments.base import Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """One scored answer, or one episode of several turns.

    logprobs: of `token_ids` under the distribution they were sampled from, nats; -inf where the engine's was not
    finite. versions: (version, start, end): tokens [start, end) were sampled by the weights of that version. Tokens of
    no version are not the policy's own: what was said between its turns.
    reward: in [0, 1]; None when the scorer failed, and `error` says how.
    turns: of the policy. rewritten: times its conversation was changed under it; only what came after is here.
    """

    problem: Problem
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, int]]
    finish_reason: str
    text: str
    reward: float | None
    error: str = ""
    turns: int = 1
    rewritten: int = 0

    @property
    def oldest_version(self) -> int:
        """The oldest weights that sampled a token of it. Raises ValueError when none did."""
        return min(version for version, _, _ in self.versions)

    @property
    def own(self) -> list[bool]:
        """Which of `token_ids` the policy sampled."""
        own = [False] * len(self.token_ids)
        for _, start, end in self.versions:
            own[start:end] = [True] * (end - start)
        return own


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt in one step."""

    problem: Problem
    rollouts: list[Rollout] = field(default_factory=list)


def sample_seed(seed: int, step: int, place: int, sample: int) -> int:
    """Seed of one answer: a function of the run's seed, the step, the prompt's place in it and the sample, 63 bits."""
    digest = hashlib.blake2b(f"{seed}:{step}:{place}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order. The first error ends the others before it is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Admitted:
    """What of a step's rollouts may be trained on, and what was left out.

    groups: with the admitted rollouts only. stale: rollouts with a token older than the bound. failed: rollouts whose
    scorer failed. lonely: groups left out because fewer than two of several rollouts remained.
    staleness: versions behind the trainer of the oldest token, of each admitted rollout.
    """

    groups: list[Group]
    stale: int
    failed: int
    lonely: int
    staleness: list[int]


def admit(groups: Sequence[Group], *, version: int, max_staleness: int) -> Admitted:
    """Sort out rollouts that must not be trained on by a trainer whose weights are `version`.

    The bound is strict: a rollout is admitted only if each of its tokens was sampled by weights of `version` -
    `max_staleness` or later.
    """
    kept, staleness = [], []
    stale = failed = lonely = 0
    for group in groups:
        fresh = [r for r in group.rollouts if not r.versions or version - r.oldest_version <= max_staleness]
        scored = [r for r in fresh if r.reward is not None]
        stale += len(group.rollouts) - len(fresh)
        failed += len(fresh) - len(scored)
        if not scored or len(scored) == 1 < len(group.rollouts):
            lonely += 1
            continue
        kept.append(Group(group.problem, scored))
        staleness += [version - r.oldest_version for r in scored]
    return Admitted(kept, stale, failed, lonely, staleness)


def browsable(rollout: Rollout, *, step: int, advantage: float | None) -> dict[str, Any]:
    """One rollout as a JSON object: for tables that people read, and with its tokens, for drafters that learn of it."""
    row = asdict(rollout)
    for name in ("problem", "logprobs", "versions", "text"):
        row.pop(name)
    return row | {
        "step": step,
        "environment": rollout.problem.environment,
        "prompt": rollout.problem.question,
        "answer": rollout.text,
        "expected": rollout.problem.expected,
        "advantage": advantage,
        "num_tokens": len(rollout.token_ids),
        "weight_version": [list(span) for span in rollout.versions],
    }
