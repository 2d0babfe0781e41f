"""The target's own answers to prompts: what the drafter learns to propose."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.drafter.template import ChatTemplate
from tasks.drafter.traffic import Prompt


class Answering(BaseModel):
    """How the target answers. max_prompt_tokens: a conversation ends before a turn whose prompt would be longer.
    concurrency: conversations in flight. seed: with a prompt's own tokens it seeds its answer."""

    model_config = ConfigDict(frozen=True)

    max_new_tokens: int
    max_prompt_tokens: int
    temperature: float
    seed: int
    concurrency: int

    def key(self, prompt: Prompt, turn: int = 0) -> str:
        """Names a prompt (and, of a longer conversation, the turn with which a sequence begins) and how it is
        answered."""
        asked = [prompt.token_ids, prompt.later, self.max_new_tokens, self.temperature, self.seed, turn]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


class Answered(BaseModel):
    """token_ids: prompt and answers. answers: (start, end) of each, token_ids[start:end] is what the target generated.
    finish_reason: of the last one, `stop` or `length`."""

    key: str
    domain: str
    token_ids: list[int]
    answers: list[tuple[int, int]]
    finish_reason: str


def longest(answered: Sequence[Answered], most: int) -> Answered:
    """The one with most generated tokens among those of at most `most` tokens, or of all where none is that short."""
    return max(
        [a for a in answered if len(a.token_ids) <= most] or answered,
        key=lambda a: sum(end - start for start, end in a.answers),
    )


async def answer(
    handle: EngineHandle,
    prompts: Sequence[Prompt],
    answering: Answering,
    template: ChatTemplate | None = None,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Answered]:
    """The target's answers to `prompts`, in their order.

    template: renders the later turns of prompts that have some. A turn whose prompt repeats all tokens so far goes on
    in the same sequence; one whose template or tokenizer changes what was said before starts another, so that every
    answer stands behind exactly the tokens that serving would put there.
    on_progress: called with (prompts answered, of all).
    """
    slots, done = asyncio.Semaphore(answering.concurrency), 0

    async def one(client: EngineClient, prompt: Prompt) -> list[Answered]:
        nonlocal done
        async with slots:
            sequences = await _converse(client, prompt, answering, template)
        done += 1
        on_progress(done, len(prompts))
        return sequences

    async with EngineClient(handle) as client:
        answered = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    return [sequence for sequences in answered for sequence in sequences]


async def _converse(
    client: EngineClient, prompt: Prompt, answering: Answering, template: ChatTemplate | None
) -> list[Answered]:
    sequences: list[Answered] = []
    messages, asked = list(prompt.messages), prompt.token_ids
    for turn in range(len(prompt.later) + 1):
        generation = await client.generate(
            asked,
            max_new_tokens=answering.max_new_tokens,
            temperature=answering.temperature,
            seed=int(answering.key(prompt, turn)[:8], 16),
            logprobs=False,
        )
        token_ids = asked + generation.token_ids
        span = (len(asked), len(token_ids))
        last = sequences[-1] if sequences else None
        if last and asked[: len(last.token_ids)] == last.token_ids:
            key, answers = last.key, [*sequences.pop().answers, span]
        else:
            key, answers = answering.key(prompt, turn), [span]
        sequences.append(
            Answered(
                key=key,
                domain=prompt.domain,
                token_ids=token_ids,
                answers=answers,
                finish_reason=generation.finish_reason,
            )
        )
        if turn < len(prompt.later):
            messages += [{"role": "assistant", "content": template.text(generation.token_ids)}, *prompt.later[turn]]
            asked = template(messages, prompt.tools)
            if len(asked) > answering.max_prompt_tokens:
                break
    return sequences
