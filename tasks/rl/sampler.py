"""Groups of answers and episodes, sampled by the engines of a fleet and scored as they finish."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from infra.cluster.fleet import Engine, Fleet
from infra.engine.answers import numbered
from tasks.rl.environments.base import Problem
from tasks.rl.environments.chat import Chat
from tasks.rl.lengths import Lengths
from tasks.rl.playing import Players
from tasks.rl.rollout import Group, Rollout, sample_seed, together
from tasks.rl.scoring import ScorerPool


class PromptTooLong(ValueError):
    """A prompt that leaves the answer no room in the engine's context."""


class Sampler:
    """fleet, scorers, players: entered. chat: of the target. max_model_len: longest prompt plus answer, tokens.

    watching(engine): a context in which the engine works on one rollout.
    """

    def __init__(
        self,
        fleet: Fleet,
        scorers: ScorerPool,
        players: Players,
        chat: Chat,
        *,
        max_new_tokens: int,
        max_model_len: int,
        watching: Callable[[Engine], AbstractContextManager] = lambda engine: nullcontext(),
    ):
        self._fleet, self._scorers, self._players, self._chat = fleet, scorers, players, chat
        self._max_new_tokens, self._max_model_len = max_new_tokens, max_model_len
        self._watching = watching

    async def group(
        self,
        problem: Problem,
        size: int,
        *,
        temperature: float,
        seed: int,
        number: int,
        place: int,
        lengths: Lengths | None = None,
    ) -> Group:
        """`size` rollouts of one problem. seed, number (of the round), place: decide what is sampled.

        lengths: tokens that each answer is sampled to, whether it has ended or not; what comes after its end, or after
        `max_new_tokens`, is neither scored nor trained on. Episodes take their own course.

        Raises ScorerError when a scorer never works, EngineError when an engine refuses or none is left, PromptTooLong.
        """
        prompt, near = self.prompt_ids(problem), await self._fleet.nearest()
        seeds = [sample_seed(seed, number, place, sample) for sample in range(size)]
        work = [
            self._rollout(near, problem, prompt, sample, temperature, own, lengths and lengths(own))
            for sample, own in enumerate(seeds)
        ]
        return Group(problem, await together(work))

    async def answer(self, problems: Sequence[Problem], count: int = 1, temperature: float = 0.0) -> list[Group]:
        """`count` answers to each problem, scored: what held-out problems are judged by. At temperature 0 the most
        likely ones. The same seeds every time, so that what differs is the weights."""
        return await together(
            [
                self.group(problem, count, temperature=temperature, seed=0, number=0, place=place)
                for place, problem in enumerate(problems)
            ]
        )

    def prompt_ids(self, problem: Problem) -> list[int]:
        """The problem's tokens. Raises PromptTooLong when prompt and answer exceed the engine's context."""
        ids = self._chat.prompt(problem.messages)
        if len(ids) + self._max_new_tokens > self._max_model_len:
            raise PromptTooLong(
                f"problem {problem.index} of {problem.environment} has {len(ids)} tokens, which with "
                f"rl.max_new_tokens={self._max_new_tokens} exceeds engine.max_model_len={self._max_model_len}: raise it"
            )
        return ids

    async def _rollout(
        self,
        near: Engine,
        problem: Problem,
        prompt: list[int],
        sample: int,
        temperature: float,
        seed: int,
        length: int | None,
    ) -> Rollout:
        if problem.environment in self._players.labels:
            return await self._episode(near, problem, prompt, sample, temperature, seed)

        async def generate(engine: Engine):
            with self._watching(engine):
                return await engine.client.generate(
                    prompt,
                    max_new_tokens=length or self._max_new_tokens,
                    temperature=temperature,
                    seed=seed,
                    ignore_eos=length is not None,
                )

        generation = await self._fleet.run(generate, near)
        end, finish_reason = len(generation.token_ids), generation.finish_reason
        if length:
            end, finish_reason = self._chat.end(generation.token_ids, self._max_new_tokens)
        text = self._chat.text(generation.token_ids[:end])
        score = await self._scorers.score(problem.environment, problem.index, text)
        return Rollout(
            problem,
            sample,
            prompt,
            generation.token_ids,
            generation.logprobs,
            [(numbered(v), start, min(stop, end)) for v, start, stop in generation.weight_versions if start < end],
            finish_reason,
            text,
            score.reward,
            score.error,
        )

    async def _episode(
        self, near: Engine, problem: Problem, prompt: list[int], sample: int, temperature: float, seed: int
    ) -> Rollout:
        async def play(engine: Engine):
            with self._watching(engine):
                return await self._players.play(
                    problem, engine.client.handle, temperature=temperature, seed=seed, budget=self._max_new_tokens
                )

        said = await self._fleet.run(play, near)
        if "token_ids" not in said:  # nothing was sampled, so there is nothing but the error
            return Rollout(problem, sample, prompt, [], [], [], "error", "", None, said["error"], 0)
        return Rollout(
            problem,
            sample,
            said["prompt_ids"],
            said["token_ids"],
            said["logprobs"],
            [(version, start, end) for version, start, end in said["versions"]],
            said["finish_reason"],
            said["text"],
            said["reward"],
            said["error"],
            said["turns"],
            said["rewritten"],
        )
