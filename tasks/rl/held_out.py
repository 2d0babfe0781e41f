"""Held-out problems and general questions: what the policy is judged by, on weights that are named."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infra.cluster.fleet import Fleet
from infra.config.flows import RLFlowConfig
from infra.services.progress import report
from tasks.evaluate import questions as general
from tasks.rl.environments.base import Problem
from tasks.rl.environments.problems import Problems
from tasks.rl.result import HeldOut
from tasks.rl.rollout import Group, together
from tasks.rl.sampler import Sampler


class Examination:
    """The same problems and questions each time. base: the model whose tokenizer asks."""

    def __init__(self, base: Path, config: RLFlowConfig, problems: Problems):
        rl = config.rl
        self._base, self._config, self.problems = base, config, problems.held_out(rl.eval_prompts)
        self.questions = general.load(rl.general_questions, rl.general_questions_each, rl.seed)

    @property
    def general_digest(self) -> str:
        """Of the general questions."""
        return general.digest(self.questions)

    async def whole(self, sampler: Sampler, fleet: Fleet, when: str) -> dict[str, Any]:
        """Mean rewards of the held-out problems, 0 where the scorer failed, answers to the general questions; JSON."""
        report(f"{len(self.problems)} held-out problems and {len(self.questions)} general questions {when} training")
        groups, answers = await together([self._answer(sampler), self._general(fleet)])
        return {
            "rewards": [_reward(group) for group in groups],
            "general": [answer.model_dump(mode="json") for answer in answers],
        }

    async def first(self, sampler: Sampler, fleet: Fleet, path: Path) -> dict[str, Any]:
        """`whole` of the model that engines start with, before they get other weights; kept in `path`, so that after
        an interruption nothing is asked again."""
        if not path.is_file():
            scratch = path.with_suffix(".unfinished")
            scratch.write_text(json.dumps(await self.whole(sampler, fleet, "before")))
            os.replace(scratch, path)
        return json.loads(path.read_text())

    async def between(self, sampler: Sampler) -> dict[str, float]:
        """Figures of the held-out problems now: `eval_reward_<environment>`, and `eval_version`, the weights that every
        token of them was sampled by (NaN if they changed meanwhile)."""
        groups = await self._answer(sampler)
        by_environment: dict[str, list[float]] = {}
        for group in groups:
            by_environment.setdefault(group.problem.environment, []).append(_reward(group))
        versions = {version for g in groups for rollout in g.rollouts for version, _, _ in rollout.versions}
        return {
            "eval_version": float(versions.pop()) if len(versions) == 1 else float("nan"),
            **{f"eval_reward_{name}": float(np.mean(rewards)) for name, rewards in by_environment.items()},
        }

    async def _answer(self, sampler: Sampler) -> list[Group]:
        rl = self._config.rl
        return await sampler.answer(self.problems, rl.eval_answers, rl.eval_temperature)

    async def _general(self, fleet: Fleet) -> list[general.Answer]:
        return await fleet.run(
            lambda engine: general.ask(
                engine.client.handle,
                self.questions,
                self._base,
                max_new_tokens=self._config.rl.general_max_new_tokens,
                concurrency=self._config.engine.max_concurrent_sequences,
            )
        )


def _reward(group: Group) -> float:
    return float(np.mean([rollout.reward or 0.0 for rollout in group.rollouts]))


def paired(problems: Sequence[Problem], before: Sequence[float], after: Sequence[float]) -> list[HeldOut]:
    """Rewards before and after by environment."""
    scores: dict[str, list[tuple[str, float, float]]] = {}
    for problem, old, new in zip(problems, before, after, strict=True):
        scores.setdefault(problem.environment, []).append((problem.question, old, new))
    return [
        HeldOut(
            environment=environment,
            before=[old for _, old, _ in rows],
            after=[new for _, _, new in rows],
            dataset_digest="sha256:" + hashlib.sha256(json.dumps([q for q, _, _ in rows]).encode()).hexdigest(),
        )
        for environment, rows in scores.items()
    ]
