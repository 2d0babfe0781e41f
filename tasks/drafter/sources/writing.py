"""English writing requests of WritingBench, as packaged with inspect-evals."""

import json

from infra.store.packages import fetch
from tasks.drafter.sources.base import Conversation, user

PACKAGE = "inspect-evals==0.28.0"
ASCII_SHARE = 0.97  # of the characters of an English request


def conversations() -> list[Conversation]:
    """One request each."""
    path = fetch(PACKAGE) / "inspect_evals/writingbench/benchmark_all.jsonl"
    queries = [json.loads(line)["query"] for line in path.read_text().splitlines()]
    return [user(q) for q in queries if sum(c.isascii() for c in q) > ASCII_SHARE * len(q)]
