"""What users asked the served target: chat requests that serve engines recorded (`release.recording`)."""

import json

from infra.engine.recorder import recorded
from tasks.drafter.sources.base import Conversation, turns
from tasks.drafter.sources.jsonl import parse


def conversations() -> list[Conversation]:
    """The recorded requests of plain text, oldest first."""
    found = []
    for line in recorded():
        try:
            conversation = parse(json.loads(line))
        except (KeyError, TypeError, ValueError):  # images, or a line that a killed engine left torn
            continue
        if turns(conversation.messages):
            found.append(conversation)
    return found
