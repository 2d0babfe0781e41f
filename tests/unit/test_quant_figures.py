import math

import pytest

from infra.config.quant import QuantizeConfig
from infra.engine.pin import engine_pin
from tasks.evaluate import evidence
from tasks.evaluate.acceptance import Measurement
from tasks.evaluate.evidence import row
from tasks.evaluate.fidelity import Scored
from tasks.evaluate.questions import Answer
from tasks.quant.figures import rows
from tasks.quant.text import markdown, records, terminal, total
from tasks.quant.view import View, texts

SUBJECT = "quant:t/1"
PROMPTS = {"chat": [[1, 2], [3]], "code": [[4]]}


def measurement(speed, prefix="", suffix=""):
    speed_row = row(f"{prefix}tokens_per_second{suffix}", speed, n=5, unit="tokens/s", subject="x", domain="all")
    outputs = {"chat": [[7, 8], []], "code": [[9, 9, 9]]}
    return Measurement(rows=[speed_row], outputs=outputs, tokens_per_second=speed, conditions="c")


def under_load(speed, suffix=""):
    measured = measurement(speed, "load_quant_", suffix)
    return measured.model_copy(update={"rows": [r | {"concurrency": 16} for r in measured.rows]})


def rewards(scores):
    sides = ("sums", "sums", "sums", "products")
    return [
        Answer(question=str(i), task=side, text="", score=s, asked=str(i))
        for i, (side, s) in enumerate(zip(sides, scores, strict=True))
    ]


def view(shift, correct, speed):
    scored = Scored(logprobs=[-1.0 - shift], top=[{7: math.log(0.5 - shift), 8: math.log(0.5 + shift)}])
    answers = [Answer(question=str(i), task="hellaswag", text="", score=c, asked=str(i)) for i, c in enumerate(correct)]
    speed = measurement(speed, "quant_", "_plain")
    load = [under_load(20.0, "_plain")]
    return View(
        speed=speed, load=load, again=speed.outputs, scored={"chat": [scored], "code": [scored]}, answers=answers
    )


@pytest.fixture(scope="module")
def table():
    found = rows(
        view(0.0, [1, 1, 0], 10.0),
        view(0.1, [1, 0, 0], 15.0),
        [measurement(30.0, "quant_"), measurement(45.0, suffix="_retrained")],
        load=[under_load(50.0)],
        rewarded=(rewards([1.0, 0.4, 0.0, 1.0]), rewards([1.0, 0.6, 0.0, 0.0])),
        drafter=7,
        config=QuantizeConfig(tasks=["hellaswag"], task_questions=3),
        sizes=(400, 100),
        prompts=PROMPTS,
        subject=SUBJECT,
        concurrency=4,
    )
    return evidence.table(found, engine=engine_pin(), hardware="x", command="test")


def test_everything_is_about_the_quant_and_the_figures_add_up(table):
    assert set(table["subject"]) == {SUBJECT}
    values = evidence.metrics(table)
    assert values["quant_size_ratio"] == 0.25
    assert values["quant_speedup"] == 1.5 and values["quant_speculation_speedup"] == 2.0
    assert values["quant_kl/all"] == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6), abs=1e-6)
    assert values["quant_perplexity_ratio/chat"] == pytest.approx(math.exp(0.1))
    assert values["quant_task_difference/hellaswag"] == pytest.approx(-1 / 3)
    assert values["quant_recovery/hellaswag"] == pytest.approx(0.5)
    assert values["quant_task_flips/hellaswag"] == pytest.approx(1 / 3)
    assert values["quant_output_identity/code"] == values["quant_output_identity_noise/chat"] == 1.0
    assert values["quant_output_identity_difference/all"] == 0.0 and values["quant_drafter_version"] == 7
    assert values["quant_reward_difference/sums"] == pytest.approx(0.2 / 3)
    assert values["quant_reward_difference/all"] == pytest.approx(-0.2)
    assert (values["quant_reward_flips/sums"], values["quant_reward_p_value/all"]) == (pytest.approx(1 / 3), 1.0)
    assert values["quant_speculation_speedup_retrained"] == 3.0 and values["load_quant_speculation_speedup/16"] == 2.5
    assert values["quant_tokens_per_second_retrained/all"] == 45.0
    assert values["quant_tokens_per_second_plain/all"] == 15.0 and values["quant_tokens_per_second/all"] == 30.0


def test_people_read_it_and_prefect_takes_it(table):
    page = markdown("t-quant/1: W8A8 of t/2", table)
    assert "| size against the base's |  | 0.25 |" in page and "| difference, paired | hellaswag | -33.3% |" in page
    widths = {line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("|")}
    assert widths == {6}  # `KL(base || quant)` is one cell
    assert [list(row) for row in records(table)] == [["figure", "domain", "value", "95% interval", "n"]] * len(
        records(table)
    )
    assert all(isinstance(cell, str) for row in records(table) for cell in row.values())
    told = terminal("t-quant/1: W8A8 of t/2", table).splitlines()
    assert told[0] == "t-quant/1: W8A8 of t/2"
    assert [line.split()[-1] for line in told if "size against the base's" in line] == ["0.25"]
    assert [line.split()[5:] for line in told if "positions whose" in line] == [["100.0%", "100.0%", "to", "100.0%"]]
    assert total({"engine": 1.0, "quantize": 2.0}, {}, {"engine": 3.0}) == {"engine": 4.0, "quantize": 2.0}


def test_the_texts_are_the_first_prompts_with_answers():
    found = texts(PROMPTS, measurement(1.0), 2)
    assert [t.model_dump() for t in found["chat"]] == [{"token_ids": [1, 2, 7, 8], "answer_start": 2}]  # one was empty
    assert [t.token_ids for t in found["code"]] == [[4, 9, 9, 9]]


def test_a_view_survives_being_written(tmp_path):
    seen = view(0.1, [1, 0], 5.0)
    seen.write(tmp_path)
    assert View.read(tmp_path).model_dump_json() == seen.model_dump_json()
