"""The target's chat template: conversations to the tokens that are served, and answers back to text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.drafter.sources.base import Message, TrafficError

_PROBE = "\N{REPLACEMENT CHARACTER}probe\N{REPLACEMENT CHARACTER}"


class ChatTemplate:
    """The chat template of the tokenizer in `model`. Raises TrafficError when it has none."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        if not self._tokenizer.chat_template:
            raise TrafficError(
                f"the tokenizer in {model} has no chat template: add chat_template.jinja to the model folder"
            )
        self._knows_tools = _PROBE in self._render([{"role": "user", "content": "."}], [_tool(_PROBE)])

    def __call__(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation, ending in the assistant's header.

        tools: in the template's own format; where it has none, as JSON in the system message.
        """
        if tools and not self._knows_tools:
            messages, tools = _told_of_tools(messages, tools), ()
        return self._tokens(self._render(messages, tools))

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer as the text that the next turn's prompt repeats."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def user_header(self) -> list[int]:
        """Token ids that come before a user's first words: what a model that writes the user's part continues.

        Raises TrafficError when the template changes what users say.
        """
        before, found, _ = self._render([{"role": "user", "content": _PROBE}], (), answer=False).partition(_PROBE)
        if not found:
            raise TrafficError("the chat template does not show users' words as they are: leave out the source `own`")
        return self._tokens(before)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], answer: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=answer, tokenize=False
        )

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def _told_of_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    told = (
        f"You can call these functions:\n{listed}\nTo call one, answer with JSON: " + '{"name": ..., "arguments": ...}'
    )
    if messages and messages[0]["role"] == "system":
        system = f"{messages[0]['content']}\n\n{told}"
        return [{"role": "system", "content": system}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]
