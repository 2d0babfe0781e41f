"""Sources of traffic, one module each. A source that needs more than a package is given its conversations by a flow."""

from importlib import import_module

from tasks.drafter.sources.base import Conversation, Source

NAMES = ("writing", "code", "mmath", "tools", "production")
OWN, RL, ROLLOUTS = "own", "rl", "rollouts"
"""Given by flows: prompts that the target writes, the RL environments' problems, the rollouts of this iteration."""


def conversations(name: str) -> list[Conversation]:
    """All conversations of the source called `name`, one of `NAMES`."""
    source: Source = import_module(f"{__name__}.{name}")
    return source.conversations()
