"""A user's own conversations: JSON lines in OpenAI chat format."""

import json
from pathlib import Path
from typing import Any

from tasks.drafter.sources.base import Conversation, TrafficError, turns

ROLES = ("system", "developer", "user", "assistant", "tool")


def read(path: Path) -> list[Conversation]:
    """Conversations of a file of `{"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}` lines; `tools`
    may be absent.

    Raises TrafficError naming the line that is not such a conversation.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            conversation = parse(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise TrafficError(
                f'{path}:{number} is not OpenAI chat format: write {{"messages": [{{"role": "user", "content": "."}}]}}'
            ) from error
        if not turns(conversation.messages):
            raise TrafficError(f"{path}:{number} has no user message: there is nothing to answer")
        found.append(conversation)
    return found


def parse(body: dict[str, Any]) -> Conversation:
    """The conversation of a chat request. Raises ValueError, KeyError or TypeError when it is not one of plain text."""
    messages = [_message(m) for m in body["messages"]]
    return Conversation(messages=messages, tools=body.get("tools") or [])


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] not in ROLES:
        raise ValueError(f"role {message['role']!r}")
    content = message["content"] if message["role"] != "assistant" else message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError("content is not text")
    kept = {key: message[key] for key in ("tool_calls", "tool_call_id", "name") if message.get(key)}
    return {"role": message["role"], "content": content} | kept
