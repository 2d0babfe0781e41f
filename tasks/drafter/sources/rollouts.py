"""The rollouts of the RL run that made the target: on-policy answers that cost nothing, as they were sampled."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.drafter.answers import Answered

FILE = "rollouts.jsonl"


def read(folders: Iterable[Path], domain: str, count: int, *, longest: int) -> list[Answered]:
    """Up to `count` different rollouts with an answer of two tokens or more from the first of `folders` that holds
    some; those of the last steps first, whose weights are nearest to the target's. None where there is one alone: a
    part of every domain is held out.

    folders: evidence of the target. domain: name of the answers' domain. longest: tokens of prompt and answers.
    """
    file = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    found: dict[str, Answered] = {}
    for line in reversed(file.read_text().splitlines() if file else []):
        row = json.loads(line)
        token_ids, answers = row["prompt_ids"] + row["token_ids"], _answers(row)
        if len(token_ids) > longest or len(found) == count or not any(end - start > 1 for start, end in answers):
            continue
        key = hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]
        found[key] = Answered(
            key=key, domain=domain, token_ids=token_ids, answers=answers, finish_reason=row["finish_reason"]
        )
    return list(found.values()) if len(found) > 1 else []


def _answers(row: dict[str, Any]) -> list[tuple[int, int]]:
    """What the policy sampled of prompt and rollout: spans of a weight version, joined where new weights came in the
    middle of an answer. What is of no version was said between its turns."""
    before, joined = len(row["prompt_ids"]), []
    for _, start, end in row["weight_version"]:
        if joined and joined[-1][1] == start + before:
            joined[-1] = (joined[-1][0], end + before)
        else:
            joined.append((start + before, end + before))
    return joined
