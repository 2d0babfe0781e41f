"""Requests that a tool can serve, each with the tools there are: the Berkeley Function-Calling Leaderboard's."""

import json
from typing import Any

from infra.store.packages import fetch
from tasks.drafter.sources.base import Conversation

PACKAGE = "bfcl-eval==2026.3.23"
SETS = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "irrelevance")
# The set's own names of types, where JSON Schema has others.
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def conversations() -> list[Conversation]:
    """One request each, with one tool or several."""
    folder, found = fetch(PACKAGE) / "bfcl_eval/data", []
    for name in SETS:
        for line in (folder / f"BFCL_v4_{name}.json").read_text().splitlines():
            entry = json.loads(line)
            tools = [{"type": "function", "function": _json_schema(f)} for f in entry["function"]]
            found.append(Conversation(messages=entry["question"][0], tools=tools))
    return found


def _json_schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_schema(v) for v in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _json_schema(v) for key, v in value.items()}
    if isinstance(schema.get("type"), str):
        schema["type"] = TYPES.get(schema["type"], schema["type"])
    return schema
