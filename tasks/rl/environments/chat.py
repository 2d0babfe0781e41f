"""Conversations as tokens: what the model said stays as it was sampled, only what others say is tokenized."""

import json
import re
from collections.abc import Sequence
from typing import Any

from tasks.rl.environments.base import BadEnvironment

_ANSWER = "LOCKSTEPANSWER"  # stands where the model's own tokens are
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Chat:
    """A tokenizer with its chat template; without a template, contents are joined by newlines.

    system_prompt: put before conversations that have no system message of their own.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None = None):
        self._tokenizer, self._system_prompt = tokenizer, system_prompt

    def prompt(self, messages: Sequence[dict], tools: Sequence[dict] | None = None) -> list[int]:
        """Tokens of a conversation up to where the model speaks. tools: as in OpenAI's chat endpoint."""
        messages = [dict(message) for message in messages]
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        if not self._tokenizer.chat_template:
            return self._tokenizer("\n".join(m["content"] for m in messages)).input_ids
        return self._tokenizer(self._render(messages, tools), add_special_tokens=False).input_ids

    def reply(self, messages: Sequence[dict], last: int, tools: Sequence[dict] | None = None) -> list[int]:
        """Tokens between the model's turn, whose last token is `last`, and its next: the rest of its own turn where it
        was cut off, `messages` (of users and tools), and the opening of the next.

        Raises BadEnvironment when the template renders no conversation like this.
        """
        if not self._tokenizer.chat_template:
            return self._tokenizer("\n".join(m["content"] for m in messages), add_special_tokens=False).input_ids
        turn = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
        _, _, after = self._render([*turn, *messages], tools).rpartition(_ANSWER)
        ids = self._tokenizer(after, add_special_tokens=False).input_ids
        return ids[1:] if ids[:1] == [last] else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, special ones left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def end(self, token_ids: Sequence[int], most: int) -> tuple[int, str]:
        """(tokens, finish reason) of the answer in `token_ids` that were sampled on after its end: up to the first end
        of sequence, which counts, and `most` at most."""
        said = list(token_ids[:most])
        if self._tokenizer.eos_token_id in said:
            return said.index(self._tokenizer.eos_token_id) + 1, "stop"
        return len(said), "length"

    def _render(self, messages: Sequence[dict], tools: Sequence[dict] | None) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise BadEnvironment(f"the model's chat template refuses a conversation of {roles}: {error}") from error


def tool_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """(what is said besides, [(tool, arguments as JSON)]) of an answer that calls tools as Hermes, Qwen and SmolLM do:
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What does not parse stays text."""
    calls = []

    def take(match: re.Match) -> str:
        try:
            call = json.loads(match[1])
            calls.append((str(call["name"]), json.dumps(call.get("arguments") or {})))
        except (json.JSONDecodeError, KeyError):
            return match[0]
        return ""

    return _CALL.sub(take, text).strip(), calls
