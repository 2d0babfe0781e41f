"""Capitals: name a country's capital. Short answers in words, of which small models know a part."""

import json
import re
import unicodedata

from infra.store.packages import fetch
from tasks.evaluate.benchmarks.base import Question

MIN_POPULATION = 1_000_000


def questions() -> list[Question]:
    """One question for each country of more than a million people whose capital is not named after it."""
    countries = []
    for file in sorted((fetch("countryinfo==1.0.1") / "countryinfo" / "data").glob("*.json")):
        country = json.loads(file.read_text())
        name, capital = country["name"], country.get("capital")
        if capital and (country.get("population") or 0) > MIN_POPULATION and _plain(name) not in _plain(capital):
            countries.append((name, capital))
    return [
        Question(
            id=f"capital of {name}",
            task="capitals",
            prompt=f"What is the capital of {name}? Answer with the city's name.",
            expected=capital,
        )
        for name, capital in countries
    ]


def judge(question: Question, text: str) -> float:
    """1 when the answer names the city, accents and case aside."""
    return float(re.search(rf"\b{re.escape(_plain(question.expected))}\b", _plain(text)) is not None)


def _plain(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in letters if not unicodedata.combining(c)).rstrip(".")
