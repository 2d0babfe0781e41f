"""BFCL, simple: call the one function there is with the right arguments (Patil et al., Berkeley Function-Calling
Leaderboard)."""

import ast
import json
import re
from typing import Any

from infra.store.packages import fetch
from tasks.evaluate.benchmarks.base import Question

PACKAGE = "bfcl-eval==2026.3.23"
SET = "BFCL_v4_simple_python.json"
_IGNORED = re.compile(r"[ ,./\-_*^]")  # in strings, as the leaderboard compares them
ABSENT = ""  # among the accepted values: the argument may be left out


def questions() -> list[Question]:
    """The 400 requests in Python."""
    folder = fetch(PACKAGE) / "bfcl_eval" / "data"
    asked, accepted = (_lines(path) for path in (folder / SET, folder / "possible_answer" / SET))
    found = []
    for entry, answer in zip(asked, accepted, strict=True):
        (function,), ((message,),), (truth,) = entry["function"], entry["question"], answer["ground_truth"]
        ((name, arguments),) = truth.items()
        found.append(
            Question(
                id=entry["id"],
                task="bfcl",
                prompt=f"You can call one function:\n{json.dumps(function)}\n\n{message['content']}\n"
                f"Answer with the call alone, in Python: {name}(argument=value, ...)",
                expected=json.dumps(
                    {"name": name, "order": list(function["parameters"]["properties"]), "arguments": arguments}
                ),
            )
        )
    return found


def judge(question: Question, text: str) -> float:
    """1 when the answer's first call of the function has every argument that it must have, none that it must not, and
    an accepted value for each."""
    wanted = json.loads(question.expected)
    given = call(wanted["name"], wanted["order"], text)
    if given is None or given.keys() - wanted["arguments"].keys():
        return 0.0
    return float(
        all(
            _accepted(given[name], values) if name in given else ABSENT in values
            for name, values in wanted["arguments"].items()
        )
    )


def call(name: str, order: list[str], text: str) -> dict[str, Any] | None:
    """Arguments of the first call of `name` in `text`; those without a name are in `order`. None without a call that
    Python can read."""
    start = text.find(f"{name}(")
    ends = [match.end() for match in re.finditer(r"\)", text) if match.end() > start >= 0]
    for end in ends:
        try:
            parsed = ast.parse(text[start:end].strip(), mode="eval").body
            named = {k.arg: ast.literal_eval(k.value) for k in parsed.keywords}
            unnamed = dict(zip(order, (ast.literal_eval(a) for a in parsed.args), strict=False))
        except (SyntaxError, ValueError, AttributeError, TypeError):
            continue  # a bracket inside an argument
        return unnamed | named
    return None


def _accepted(given: Any, values: list[Any]) -> bool:
    return any(_same(given, value) for value in values)


def _same(given: Any, value: Any) -> bool:
    if isinstance(given, str) and isinstance(value, str):
        return _IGNORED.sub("", given).casefold() == _IGNORED.sub("", value).casefold()
    if isinstance(given, list | tuple) and isinstance(value, list):
        return len(given) == len(value) and all(map(_same, given, value))
    if isinstance(given, dict) and isinstance(value, dict):
        known = given.keys() <= value.keys()
        return known and all(_accepted(given[k], v) if k in given else ABSENT in v for k, v in value.items())
    return given == value and (type(given) is type(value) or _numbers(given, value))


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
