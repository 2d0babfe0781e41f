"""Needle: who, of three to five people, feels a certain way about a thing (reasoning-gym `needle_haystack`)."""

import re

from tasks.evaluate.benchmarks.base import Question

SIZE = 200


def questions() -> list[Question]:
    """200 seeded questions."""
    from reasoning_gym import create_dataset

    entries = create_dataset("needle_haystack", size=SIZE, seed=0, min_num_statements=3, max_num_statements=5)
    return [
        Question(id=f"needle-{i:03}", task="needle", prompt=entry["question"], expected=entry["answer"])
        for i, entry in enumerate(entries)
    ]


def judge(question: Question, text: str) -> float:
    """1 when the answer names the right person and none of the others."""
    statements = question.prompt.rpartition("\n")[0]
    people = [statement.split()[0] for statement in statements.split(". ") if statement.strip()]
    named = [name for name in people if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
    return float(named == [question.expected])
