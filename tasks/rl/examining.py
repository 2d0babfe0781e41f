"""The held-out problems for whoever asks another model than the policy: which they are, and what answers are worth."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from infra.config.rl import RLConfig, VerifiersEnvironment
from infra.services.prefect import durable
from infra.services.progress import report
from tasks.evaluate.problems import Problem
from tasks.evaluate.questions import Answer
from tasks.rl.environments.chat import Chat
from tasks.rl.environments.make import make
from tasks.rl.environments.problems import Problems
from tasks.rl.scoring import ScorerPool


def held_out_problems(config: RLConfig, count: int, model: Path, room: int) -> list[Problem]:
    """Up to `count` held-out problems of each environment, the first of those that the policy is judged by; those of
    environments that are played in several turns, and those that leave no room for the answer, are left out.

    model: folder of the target, for its tokenizer. room: longest prompt plus answer, tokens. Raises BadEnvironment.
    """
    from transformers import AutoTokenizer

    scored = [e for e in config.environments if not isinstance(e, VerifiersEnvironment)]
    if not scored or not count:
        return []
    problems = Problems(scored, make(scored, config.seed), config.held_out_share, config.seed)
    chat = Chat(AutoTokenizer.from_pretrained(model), config.system_prompt)
    found = [
        Problem(
            environment=problem.environment,
            index=problem.index,
            prompt=chat.prompt(problem.messages),
            max_new_tokens=config.max_new_tokens,
        )
        for problem in problems.held_out(count)
    ]
    return [problem for problem in found if len(problem.prompt) + problem.max_new_tokens <= room]


@durable(name="score held-out problems")
def score(problems: list[Problem], texts: list[str], config: RLConfig, run: str) -> list[Answer]:
    """What the environments give for `texts`, the answers to `problems` in their order; 0 where a scorer failed.

    Raises BadEnvironment, or ScorerError when a scorer never works.
    """
    report(f"scoring {len(texts)} answers to held-out problems")
    return asyncio.run(_score(problems, texts, config))


async def _score(problems: Sequence[Problem], texts: Sequence[str], config: RLConfig) -> list[Answer]:
    scored = [e for e in config.environments if not isinstance(e, VerifiersEnvironment)]
    limits = dict(processes=config.scorer_processes, timeout_s=config.scorer_timeout_s)
    async with ScorerPool(scored if problems else [], config.seed, **limits) as scorers:
        scores = await asyncio.gather(
            *(scorers.score(p.environment, p.index, text) for p, text in zip(problems, texts, strict=True))
        )
    return [
        Answer(
            question=str(problem.index),
            task=problem.environment,
            text=text,
            score=given.reward or 0.0,
            asked="sha256:" + hashlib.sha256(json.dumps(problem.model_dump(), sort_keys=True).encode()).hexdigest(),
        )
        for problem, text, given in zip(problems, texts, scores, strict=True)
    ]
