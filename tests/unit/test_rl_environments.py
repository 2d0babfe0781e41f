"""Environments, their splits, and scorers that misbehave."""

import asyncio
import json

import pytest

from infra.config.rl import JsonlEnvironment, ReasoningGym, RLConfig
from tasks.rl.environments.base import BadEnvironment
from tasks.rl.environments.generated import Generated
from tasks.rl.environments.make import make
from tasks.rl.environments.problems import Problems
from tasks.rl.examining import held_out_problems, score
from tasks.rl.scoring import ScorerError, ScorerPool

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
PRODUCTS, SUMS = ReasoningGym(name="products", params=DIGITS), ReasoningGym(name="chain_sum", params=DIGITS, weight=3)


def jsonl(tmp_path, scorer="tests.unit.scorers:moody", lines=12) -> JsonlEnvironment:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}", "answer": str(n)}) + "\n" for n in range(lines)))
    return JsonlEnvironment(path=str(path), scorer=scorer)


def problems(configs, seed=0) -> Problems:
    return Problems(configs, make(configs, seed), 0.2, seed)


def test_held_out_questions_are_never_trained_on():
    source = problems([PRODUCTS, SUMS])
    held_out = source.held_out(64)
    trained = {p.question for p in source.take(600)}
    assert not trained & {p.question for p in held_out}
    assert len({p.question for p in held_out}) == len(held_out)  # 100 products exist, so fewer than 64 are held out
    assert 10 < sum(p.environment == "products" for p in held_out) < 35
    assert 25 < sum(p.environment == "chain_sum" for p in held_out) <= 64


def test_another_model_is_asked_the_held_out_problems_and_judged_as_the_policy_is(tiny_llama, tmp_path):
    config = RLConfig(environments=[PRODUCTS, jsonl(tmp_path, "tests.unit.scorers:exact", 40)], max_new_tokens=8)
    asked = held_out_problems(config, 3, tiny_llama, room=512)
    source = problems(config.environments).held_out(3)
    assert [(p.environment, p.index) for p in asked] == [(p.environment, p.index) for p in source]
    assert all(p.max_new_tokens == 8 and p.prompt for p in asked)
    longest = max(len(p.prompt) for p in asked)
    fewer = held_out_problems(config, 3, tiny_llama, room=longest + 7)  # no room for the answer to the longest
    assert fewer == [p for p in asked if len(p.prompt) < longest]
    assert held_out_problems(config, 0, tiny_llama, room=512) == []
    texts = [p.question.removeprefix("question ") if place != 4 else "no" for place, p in enumerate(source)]
    answers = score.fn(asked, texts, config, "r")
    assert [(a.task, a.question) for a in answers] == [(p.environment, str(p.index)) for p in asked]
    assert [a.score for a in answers[3:]] == [1.0, 0.0, 1.0]
    assert score.fn([], [], config, "r") == []


def test_environments_take_turns_by_weight():
    taken = [p.environment for p in problems([PRODUCTS, SUMS]).take(40)]
    assert taken.count("chain_sum") == 30
    assert taken[:8].count("chain_sum") == 6


def test_the_cursor_continues_where_it_stood(tmp_path):
    configs = [PRODUCTS, jsonl(tmp_path)]
    whole = problems(configs).take(60)
    first, second = problems(configs), problems(configs)
    start = first.take(23)
    second.restore(json.loads(json.dumps(first.state())))
    assert start + second.take(37) == whole
    assert problems(configs, seed=1).take(60) != whole


def test_a_file_is_read_whole_in_every_epoch(tmp_path):
    source = problems([jsonl(tmp_path)])
    held_out = {p.question for p in source.held_out(12)}
    epochs = [[p.question for p in source.take(12 - len(held_out))] for _ in range(3)]
    assert all(set(epoch) | held_out == {f"question {n}" for n in range(12)} for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ReasoningGym(name="chain_sums"), "no generator 'chain_sums': did you mean chain_sum"),
        (ReasoningGym(name="chain_sum", params={"digits": 1}), "refuses params"),
        (ReasoningGym(name="chain_sum", params={"min_terms": -1}), "refuses params"),
        (JsonlEnvironment(path="absent.jsonl", scorer="tests.unit.scorers:exact"), "absent.jsonl is not a file"),
    ],
)
def test_bad_environments_say_what_is_wrong(config, message):
    with pytest.raises(BadEnvironment, match=message):
        make([config], 0)


def test_bad_lines_are_named(tmp_path):
    config = jsonl(tmp_path)
    for line, message in (("{", "jsonl:13 is not JSON"), ('{"question": "x"}', 'jsonl:13 needs a "prompt"')):
        path = tmp_path / "bad.jsonl"
        path.write_text((tmp_path / "prompts.jsonl").read_text() + line + "\n")
        with pytest.raises(BadEnvironment, match=message):
            make([config.model_copy(update={"path": str(path)})], 0)


def test_environments_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two environments have the same name"):
        RLConfig(environments=[SUMS, SUMS])
    RLConfig(environments=[SUMS, SUMS.model_copy(update={"label": "longer sums"})])


def test_scores_of_generated_problems_and_tags():
    async def scores():
        problem = problems([SUMS]).take(1)[0]
        answers = [problem.expected, f"I think <answer> {problem.expected} </answer>", "none of it", ""]
        async with ScorerPool([SUMS], 0, processes=1) as pool:
            return [(await pool.score("chain_sum", problem.index, answer)).reward for answer in answers]

    assert asyncio.run(scores()) == [1.0, 1.0, 0.0, 0.0]


def test_the_last_number_of_an_answer_can_be_what_counts():
    environment = Generated(SUMS.model_copy(update={"extract": "last_number"}), 0)
    problem = environment.problem(0)
    assert environment.score(0, f"1 and 2 is not {problem.expected}.") == 1.0
    assert environment.score(0, f"{problem.expected}, or rather 1,234.5") == 0.0
    assert environment.score(0, "none") == 0.0


def test_a_scorer_that_misbehaves_costs_its_own_answer(tmp_path):
    async def scores():
        async with ScorerPool([jsonl(tmp_path)], 0, processes=2, timeout_s=600) as pool:
            answers = ["fine", "raise", "die", "too much", "fine", "fine"]
            return await asyncio.gather(*(pool.score("jsonl", 0, answer) for answer in answers))

    fine, error, died, bounds, *later = asyncio.run(scores())
    assert [s.reward for s in (fine, *later)] == [1.0] * 3
    assert [s.reward for s in (error, died, bounds)] == [None] * 3
    assert "KeyError" in error.error
    assert died.error == "the scorer's process died"
    assert "must lie in [0, 1], not 2.0" in bounds.error


def test_a_scorer_that_hangs_is_killed_and_another_takes_its_place(tmp_path):
    async def scores():
        async with ScorerPool([jsonl(tmp_path)], 0, processes=1, timeout_s=0.5, give_up_after=1000) as pool:
            hung = await pool.score("jsonl", 0, "hang")
            while (await pool.score("jsonl", 0, "fine")).reward != 1.0:
                pass  # this machine may be too slow for half a second
            return hung

    hung = asyncio.run(scores())
    assert (hung.reward, hung.error) == (None, "no score within 0.5 s")


def test_a_scorer_that_never_works_stops_the_run(tmp_path):
    async def scores():
        async with ScorerPool([jsonl(tmp_path)], 0, processes=1, give_up_after=3) as pool:
            await asyncio.gather(*(pool.score("jsonl", 0, "raise") for _ in range(3)))

    with pytest.raises(ScorerError, match=r"scorer tests.unit.scorers:moody of environment jsonl failed .* KeyError"):
        asyncio.run(scores())


def test_a_scorer_that_cannot_be_imported_is_named(tmp_path):
    async def enter():
        async with ScorerPool([jsonl(tmp_path, scorer="tests.unit.scorers:absent")], 0):
            pass

    with pytest.raises(BadEnvironment, match="scorer tests.unit.scorers:absent cannot be imported"):
        asyncio.run(enter())
