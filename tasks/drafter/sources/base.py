"""What a source of traffic gives: conversations in OpenAI chat format, whose answers the target writes itself."""

from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

Message = dict[str, Any]


class TrafficError(ValueError):
    """Prompts that cannot be used, or too few of them."""


class Conversation(BaseModel):
    """messages: OpenAI chat messages with text as `content`. tools: OpenAI function definitions that it may call."""

    model_config = ConfigDict(frozen=True)

    messages: list[Message]
    tools: list[dict[str, Any]] = []

    def texts(self) -> list[str]:
        """What users say in it."""
        return [m["content"] for m in self.messages if m["role"] == "user"]


class Source(Protocol):
    """A module with this function."""

    def conversations(self) -> list[Conversation]:
        """All that there are, always in the same order."""


def user(content: str) -> Conversation:
    """A conversation of one user message."""
    return Conversation(messages=[{"role": "user", "content": content}])


def turns(messages: list[Message]) -> list[list[Message]]:
    """What is said before each answer that the target writes.

    Recorded answers make way for the target's own, but for those that called a tool: the tool's result belongs to that
    call, so call and result stay as context. What comes before the first user message is context too, and what follows
    the last one that can be answered is left out.
    """
    asked: list[list[Message]] = [[]]
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        calls = following is not None and following["role"] == "tool"
        waiting = any(m["role"] in ("user", "tool") for m in asked[-1])
        if message["role"] != "assistant" or calls or (not waiting and len(asked) == 1):
            asked[-1].append(message)
        elif waiting:
            asked.append([])
    while asked[-1] and asked[-1][-1]["role"] not in ("user", "tool"):
        asked[-1].pop()
    return asked if asked[-1] else asked[:-1]
