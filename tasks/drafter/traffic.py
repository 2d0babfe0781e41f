"""Traffic: prompts by domain, on which the target's own answers teach the drafter and on which acceptance is measured.

Sources are modules of `tasks/drafter/sources`. MT-Bench, HumanEval and GSM8K measure drafters and never train them:
`gather` refuses their questions from files, and passes over them in what machines collected.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.config.drafter import TrafficSource
from tasks.drafter import measuring, sources
from tasks.drafter.sources import jsonl
from tasks.drafter.sources.base import Conversation, Message, TrafficError, turns

COLLECTED = ("production", sources.OWN)  # by machines: what must not be used is passed over


class Prompt(BaseModel):
    """One prompt, and what follows once it is answered.

    messages: up to the first answer. token_ids: theirs, with the chat template and the assistant's header applied.
    later: messages before the second, third, ... answer. tools: OpenAI function definitions.
    """

    domain: str
    messages: list[Message]
    token_ids: list[int]
    later: list[list[Message]] = []
    tools: list[dict[str, Any]] = []


class Traffic(BaseModel):
    """Prompts to train on and prompts to measure on; no prompt is in both."""

    train: list[Prompt]
    held_out: list[Prompt]

    def held_out_ids(self) -> dict[str, list[list[int]]]:
        """Token ids of the held-out prompts by domain."""
        by_domain: dict[str, list[list[int]]] = {}
        for prompt in self.held_out:
            by_domain.setdefault(prompt.domain, []).append(prompt.token_ids)
        return by_domain

    def train_ids(self, count: int) -> list[list[int]]:
        """Token ids of `count` prompts to train on, or of all, the domains in turn."""
        by_domain: dict[str, list[list[int]]] = {}
        for prompt in self.train:
            by_domain.setdefault(prompt.domain, []).append(prompt.token_ids)
        turns = zip_longest(*by_domain.values())
        return [tokens for turn in turns for tokens in turn if tokens][:count]

    def held_out_digest(self) -> str:
        """`sha256:` of the held-out prompts' token ids by domain."""
        canonical = json.dumps(self.held_out_ids(), sort_keys=True)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def gather(
    wanted: Sequence[TrafficSource],
    apply_template: Callable[[list[Message], list[dict[str, Any]]], list[int]],
    *,
    held_out: int,
    max_prompt_tokens: int,
    seed: int,
    given: Mapping[str, Sequence[Conversation]] | None = None,
    benchmarks: Sequence[str] = (),
) -> Traffic:
    """Prompts of every source: `source.prompts` to train on and `held_out` others to measure on, chosen by `seed`; to
    measure on also the questions of `benchmarks`, however long.

    apply_template: the target's chat template, messages and tools to token ids that end in the assistant's header.
    given: conversations of sources that a flow provides, by name.
    Raises TrafficError when a source is unknown, too small, or a file that holds a question that only measures.
    """
    seen: set[tuple[int, ...]] = set()
    traffic = Traffic(train=[], held_out=[])
    for source in wanted:
        conversations = _load(source.source, given or {})
        random.Random(f"{seed}:{source.domain}:{source.source}").shuffle(conversations)
        chosen: list[Prompt] = []
        for conversation in _allowed(conversations, source.source):
            first, *later = turns(conversation.messages)
            token_ids = apply_template(first, conversation.tools)
            if len(token_ids) > max_prompt_tokens or tuple(token_ids) in seen:
                continue
            seen.add(tuple(token_ids))
            chosen.append(
                Prompt(domain=source.domain, messages=first, token_ids=token_ids, later=later, tools=conversation.tools)
            )
            if len(chosen) == held_out + source.prompts:
                break
        else:
            raise TrafficError(
                f"source {source.source} has {len(chosen)} different prompts of at most {max_prompt_tokens} tokens, "
                f"{held_out + source.prompts} are asked for ({source.prompts} to train on, {held_out} to measure on): "
                f"lower drafter.traffic prompts or drafter.eval_prompts, or raise drafter.max_prompt_tokens"
            )
        traffic.held_out += chosen[:held_out]
        traffic.train += chosen[held_out:]
    for name in benchmarks:
        for asked in measuring.conversations(name):
            token_ids = apply_template(asked.messages, asked.tools)
            traffic.held_out.append(Prompt(domain=name, messages=asked.messages, token_ids=token_ids))
    # Mixed, so that a capture that its byte budget cuts short has something of every domain.
    random.Random(seed).shuffle(traffic.train)
    return traffic


def _allowed(conversations: Sequence[Conversation], source: str) -> Iterator[Conversation]:
    for conversation in conversations:
        found = measuring.found_in(conversation.texts())
        if found is None:
            yield conversation
        elif source not in COLLECTED:
            name, text = found
            raise TrafficError(
                f"source {source} holds a question of {name}, which measures drafters and must not train them: "
                f"remove it ({text[:60]!r}...)"
            )


def _load(source: str, given: Mapping[str, Sequence[Conversation]]) -> list[Conversation]:
    if source in given:
        return list(given[source])
    if source in sources.NAMES:
        return sources.conversations(source)
    if Path(source).is_file():
        return jsonl.read(Path(source))
    raise TrafficError(
        f"drafter.traffic: {source} is neither a source ({', '.join([*sources.NAMES, *given])}) nor a JSONL file"
    )
