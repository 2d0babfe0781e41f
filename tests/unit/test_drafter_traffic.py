"""Prompts that drafters learn from, and those that only measure."""

import json

import pytest

from infra.config.drafter import TrafficSource
from tasks.drafter import traffic


def letters(messages: traffic.Messages) -> list[int]:
    """A chat template for tests: the letters of all messages."""
    return [ord(c) for message in messages for c in message["content"]]


def asked(*questions: str) -> list[traffic.Messages]:
    return [[{"role": "user", "content": q}] for q in questions]


def gather(sources, *, held_out=2, given=None, longest=200, seed=0):
    return traffic.gather(sources, letters, held_out=held_out, max_prompt_tokens=longest, seed=seed, given=given or {})


MANY = {"mine": asked(*(f"question number {i}" for i in range(30)))}
MINE = TrafficSource(domain="chat", source="mine", prompts=5)


def test_no_prompt_is_both_trained_on_and_measured():
    other = TrafficSource(domain="again", source="mine", prompts=5)
    gathered = gather([MINE, other], held_out=4, given=MANY)
    train, held_out = ({tuple(p.token_ids) for p in part} for part in (gathered.train, gathered.held_out))
    assert (len(train), len(held_out)) == (10, 8)
    assert not train & held_out
    assert {d: len(p) for d, p in gathered.held_out_ids().items()} == {"chat": 4, "again": 4}


def test_choice_follows_the_seed():
    assert gather([MINE], given=MANY) == gather([MINE], given=MANY)
    assert gather([MINE], given=MANY) != gather([MINE], given=MANY, seed=1)
    assert gather([MINE], given=MANY).held_out_digest() != gather([MINE], given=MANY, seed=1).held_out_digest()


def test_long_and_repeated_prompts_are_passed_over():
    given = {"mine": asked("x" * 300, *["the same question"] * 50, "one", "two", "three")}
    gathered = gather([TrafficSource(domain="chat", source="mine", prompts=2)], given=given)
    assert sorted(p.messages[0]["content"] for p in gathered.train + gathered.held_out) == sorted(
        ["the same question", "one", "two", "three"]
    )


def test_too_small_a_source_says_what_to_change():
    with pytest.raises(traffic.TrafficError, match=r"source mine has 3 different prompts.*lower.*eval_prompts"):
        gather([MINE], given={"mine": asked("a", "b", "c")})


def test_an_unknown_source_names_those_there_are():
    with pytest.raises(traffic.TrafficError, match="neither a source .*writing.*mine.* nor a JSONL file"):
        gather([TrafficSource(domain="chat", source="nowhere.jsonl")], given=MANY)


@pytest.mark.parametrize("name", ["MT-Bench", "HumanEval", "GSM8K"])
def test_questions_that_measure_are_never_trained_on(name):
    question = max(traffic.measuring()[name], key=len)
    given = {"mine": MANY["mine"] + asked(f"Please: {question.upper()}!")}
    with pytest.raises(traffic.TrafficError, match=f"holds a question of {name}"):
        gather([TrafficSource(domain="chat", source="mine", prompts=29)], given=given, longest=100_000)


@pytest.mark.parametrize("source", list(traffic.SOURCES))
def test_built_in_sources_are_free_of_them(source):
    found = len(traffic.SOURCES[source]())
    assert found > 300
    gathered = gather([TrafficSource(domain="d", source=source, prompts=300)], longest=10**6)
    assert len(gathered.train) == 300


def test_jsonl_in_chat_format_ends_at_the_last_question(tmp_path):
    path = tmp_path / "mine.jsonl"
    turns = [("system", "be brief"), ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2")]
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    (conversation,) = traffic.jsonl(path)
    assert [m["content"] for m in conversation] == ["be brief", "one?", "1", "two?"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompt": "x"}', '{"messages": [{"role": "user"}]}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line + "\n")
    with pytest.raises(traffic.TrafficError, match=r"mine\.jsonl:2 is not OpenAI chat format"):
        traffic.jsonl(path)


def test_the_chat_template_opens_the_answer(tiny_llama):
    apply = traffic.chat_template(tiny_llama)
    one, two = (apply([{"role": "user", "content": text}]) for text in ("Hello", "Goodbye then"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert tokenizer.decode(one).endswith("Hello<|im_end|>\n<|im_start|>assistant\n")
    assert one[-3:] == two[-3:]
