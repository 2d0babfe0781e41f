"""Problems of a JSONL file, scored by a Python function of the user."""

import importlib
import json
import os
import sys
from pathlib import Path

from infra.config.rl import JsonlEnvironment
from tasks.rl.environments.base import BadEnvironment, Problem


class Jsonl:
    """One file and one scorer.

    Raises BadEnvironment naming the line or the function that cannot be used.
    """

    def __init__(self, config: JsonlEnvironment, seed: int):
        self.label = config.title
        self._entries = _read(Path(config.path))
        self.size = len(self._entries)
        self._function = _function(config.scorer)

    def problem(self, index: int) -> Problem:
        """Line number `index` of the file, blank lines left out."""
        entry = self._entries[index]
        prompt = entry["prompt"]
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        return Problem(self.label, index, messages, str(entry.get("answer", "")))

    def score(self, index: int, answer: str) -> float:
        """What the scorer returns for (answer, line as a dict)."""
        return float(self._function(answer, self._entries[index]))


def _read(path: Path) -> list[dict]:
    if not path.is_file():
        raise BadEnvironment(f"{path} is not a file: environments of type jsonl need `path`")
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadEnvironment(f"{path}:{number} is not JSON: {error}") from error
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not (isinstance(prompt, str) or _is_conversation(prompt)):
            raise BadEnvironment(f'{path}:{number} needs a "prompt": a string, or messages with role and content')
        entries.append(entry)
    if not entries:
        raise BadEnvironment(f"{path} holds no line")
    return entries


def _is_conversation(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in prompt)
    )


def _function(name: str):
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a scorer usually lies in the folder the run is started from
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadEnvironment(f"scorer {name} cannot be imported: {error}; give it as module:function") from error
