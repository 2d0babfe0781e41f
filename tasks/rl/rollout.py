"""Rollouts: groups of answers sampled by the engines, scored as they finish."""

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from infra.engine.client import EngineClient
from tasks.rl.environments.base import Problem
from tasks.rl.scoring import ScorerPool

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """One scored answer.

    logprobs: of `token_ids` under the distribution they were sampled from, nats; -inf where the engine's was not
    finite. versions: (version, start, end): tokens [start, end) were sampled by the weights of that version.
    reward: in [0, 1]; None when the scorer failed, and `error` says how.
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

    @property
    def oldest_version(self) -> int:
        """The oldest weights that sampled a token of it."""
        return min(version for version, _, _ in self.versions)


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


class PromptTooLong(ValueError):
    """A prompt that leaves the answer no room in the engine's context."""


class RolloutWorker:
    """Samples and scores through any number of engines.

    clients: entered. tokenizer: the target's, of transformers. max_concurrent: requests in flight over all engines.
    max_model_len: longest prompt plus answer, tokens. system_prompt: put before every problem.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        scorers: ScorerPool,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        max_model_len: int,
        max_concurrent: int,
        system_prompt: str | None = None,
    ):
        self._clients, self._scorers, self._tokenizer = list(clients), scorers, tokenizer
        self._max_new_tokens, self._max_model_len = max_new_tokens, max_model_len
        self._slots = asyncio.Semaphore(max_concurrent)
        self._system_prompt = system_prompt

    async def sample(
        self, problems: Sequence[Problem], group_size: int, *, temperature: float, seed: int, step: int
    ) -> list[Group]:
        """A group of `group_size` rollouts for each problem, in the problems' order whatever finishes first.

        Raises ScorerError when a scorer never works, EngineError when an engine refuses.
        """
        prompts = [self.prompt_ids(problem) for problem in problems]
        running = []
        for place, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
            client = self._clients[place % len(self._clients)]  # one engine a group: its prefix cache holds the prompt
            for sample in range(group_size):
                chosen = sample_seed(seed, step, place, sample)
                running.append(self._rollout(client, problem, prompt, sample, temperature, chosen))
        rollouts = await together(running)
        return [
            Group(problem, rollouts[place * group_size : (place + 1) * group_size])
            for place, problem in enumerate(problems)
        ]

    async def answer(self, problems: Sequence[Problem]) -> list[Rollout]:
        """The most likely answer (temperature 0) to each problem, scored: what held-out problems are judged by."""
        groups = await self.sample(problems, 1, temperature=0.0, seed=0, step=0)
        return [group.rollouts[0] for group in groups]

    def prompt_ids(self, problem: Problem) -> list[int]:
        """The problem's tokens through the target's chat template, or as they are where it has none.

        Raises PromptTooLong when prompt and answer exceed the engine's context.
        """
        messages = [dict(message) for message in problem.messages]
        if self._system_prompt is not None:
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = self._tokenizer("\n".join(m["content"] for m in messages)).input_ids
        if len(ids) + self._max_new_tokens > self._max_model_len:
            raise PromptTooLong(
                f"problem {problem.index} of {problem.environment} has {len(ids)} tokens, which with "
                f"rl.max_new_tokens={self._max_new_tokens} exceeds engine.max_model_len={self._max_model_len}: raise it"
            )
        return ids

    async def _rollout(
        self, client: EngineClient, problem: Problem, prompt: list[int], sample: int, temperature: float, seed: int
    ) -> Rollout:
        async with self._slots:
            generation = await client.generate(
                prompt, max_new_tokens=self._max_new_tokens, temperature=temperature, seed=seed
            )
        text = self._tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        score = await self._scorers.score(problem.environment, problem.index, text)
        return Rollout(
            problem,
            sample,
            prompt,
            generation.token_ids,
            generation.logprobs,
            [(int(version), start, end) for version, start, end in generation.weight_versions],
            generation.finish_reason,
            text,
            score.reward,
            score.error,
        )


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
        fresh = [r for r in group.rollouts if version - r.oldest_version <= max_staleness]
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
    """One rollout as a JSON object for tables that people read."""
    row = asdict(rollout)
    for name in ("problem", "prompt_ids", "token_ids", "logprobs", "versions", "text"):
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
