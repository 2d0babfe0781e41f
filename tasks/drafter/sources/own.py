"""Prompts that the target writes itself: what it puts where the chat template expects the user's words.

Sampled behind the template's user header, they follow what the target was post-trained on, and there are as many as
one asks for (the method of Xu et al., "Magpie", 2024).
"""

import asyncio
import hashlib
import math
import re
from collections.abc import Callable, Iterable

from infra.engine.client import EngineClient
from infra.engine.spec import EngineHandle
from tasks.drafter import measuring
from tasks.drafter.sources.base import Conversation, TrafficError, user
from tasks.drafter.template import ChatTemplate

SHORTEST = 12  # characters of a prompt
REPEATED_WORDS = 4  # a run of so many words that comes again is a loop, not a question
SPARE = 1.2  # samples for each that should do
ATTEMPTS = 8  # samples for each prompt that is wanted, at most


async def write(
    handle: EngineHandle,
    template: ChatTemplate,
    count: int,
    *,
    max_tokens: int,
    concurrency: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Conversation]:
    """`count` different prompts of at most `max_tokens` with the chat template, none of them a question that only
    measures, sampled at temperature 1. The same ones for the same `seed`.

    concurrency: requests in flight. on_progress: called with (prompts found, of all).
    Raises TrafficError when the target ends too few of `ATTEMPTS * count` in time, or repeats itself.
    """
    header, slots = template.user_header(), asyncio.Semaphore(concurrency)
    seen: set[str] = set()

    async def sample(client: EngineClient, number: int) -> str:
        """A prompt; empty when it is of no use."""
        drawn = int(hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:8], 16)
        async with slots:
            written = await client.generate(
                header, max_new_tokens=max_tokens, temperature=1.0, seed=drawn, logprobs=False
            )
        text = template.text(written.token_ids).strip() if written.finish_reason == "stop" else ""
        words = question(text)
        if not words or not fits(text, template, max_tokens):
            return ""
        seen.add(words)
        on_progress(min(len(seen), count), count)
        return text

    found: list[str] = []
    asked = 0
    async with EngineClient(handle) as client:
        on_progress(0, count)
        while more := wanted(count, len(found), asked):
            texts = await asyncio.gather(*(sample(client, number) for number in range(asked, asked + more)))
            found, asked = distinct([*found, *texts]), asked + more
            if len(found) >= count:
                return [user(text) for text in found[:count]]
    raise TrafficError(
        f"the target wrote {len(found)} usable prompts in {ATTEMPTS * count} attempts of {max_tokens} tokens, {count} "
        f"are wanted: lower the prompts of the source `own`, or raise drafter.max_prompt_tokens"
    )


def wanted(count: int, found: int, asked: int) -> int:
    """How many samples to draw next for `count` prompts: what is missing at the share that was usable so far and some
    more, for a round lasts as long as its longest answer; no more than `ATTEMPTS * count` in all."""
    missing = count - found
    expected = math.ceil(SPARE * missing * (asked / found if found else 1))
    return max(0, min(expected, ATTEMPTS * count - asked))


def fits(text: str, template: ChatTemplate, max_tokens: int) -> bool:
    """Whether traffic takes it: at most `max_tokens` with `template` around it, and no measuring question."""
    return len(template([{"role": "user", "content": text}])) <= max_tokens and measuring.found_in([text]) is None


def question(text: str) -> str:
    """Its words, by which it is known when it comes again; empty when it is not worth asking: too short, not in words,
    or a loop."""
    words = re.findall(r"\w+", text.lower())
    runs = [tuple(words[i : i + REPEATED_WORDS]) for i in range(len(words) - REPEATED_WORDS + 1)]
    readable = sum(c.isalpha() or c.isspace() for c in text) > 0.5 * len(text)
    worth_asking = len(text) >= SHORTEST and readable and len(words) > 2 and len(runs) == len(set(runs))
    return " ".join(words) if worth_asking else ""


def distinct(texts: Iterable[str]) -> list[str]:
    """Those worth asking, in their order, none twice."""
    found: dict[str, str] = {}
    for text in texts:
        if words := question(text):
            found.setdefault(words, text)
    return list(found.values())
