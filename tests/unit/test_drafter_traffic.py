"""Prompts that drafters learn from, and those that only measure."""

import json

import pytest
from pydantic import ValidationError

from infra.config.drafter import DrafterConfig, TrafficSource
from infra.config.flows import DrafterFlowConfig
from infra.config.load import load, presets
from tasks.drafter import measuring, sources, traffic
from tasks.drafter.sources import jsonl, own, rollouts
from tasks.drafter.sources.base import Conversation, TrafficError, turns, user
from tasks.drafter.template import ChatTemplate

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def letters(messages, tools) -> list[int]:
    """A chat template for tests: the letters of all messages."""
    return [ord(c) for message in messages for c in message["content"]]


def asked(*questions: str) -> list[Conversation]:
    return [user(q) for q in questions]


def gather(wanted, *, held_out=2, given=None, longest=200, seed=0):
    return traffic.gather(wanted, letters, held_out=held_out, max_prompt_tokens=longest, seed=seed, given=given or {})


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
    with pytest.raises(TrafficError, match=r"source mine has 3 different prompts.*lower.*eval_prompts"):
        gather([MINE], given={"mine": asked("a", "b", "c")})


def test_an_unknown_source_names_those_there_are():
    with pytest.raises(TrafficError, match="neither a source .*writing.*mine.* nor a JSONL file"):
        gather([TrafficSource(domain="chat", source="nowhere.jsonl")], given=MANY)


@pytest.mark.parametrize("name", ["MT-Bench", "HumanEval", "GSM8K"])
def test_questions_that_measure_are_never_trained_on(name):
    question = max(measuring.questions()[name], key=len)
    spoiled = MANY["mine"] + asked(f"Please: {question.upper()}!")
    wanted = [TrafficSource(domain="chat", source="mine", prompts=29)]
    with pytest.raises(TrafficError, match=f"holds a question of {name}"):
        gather(wanted, given={"mine": spoiled}, longest=100_000)
    # Nor in a later turn.
    first, last = spoiled[0].messages[0], spoiled[-1].messages[0]
    late = Conversation(messages=[first, {"role": "assistant", "content": "Yes?"}, last])
    with pytest.raises(TrafficError, match=f"holds a question of {name}"):
        gather(wanted, given={"mine": [*MANY["mine"], late]}, longest=100_000)


def test_questions_that_measure_are_asked_to_measure():
    names = ["mt_bench", "humaneval", "gsm8k"]
    gathered = traffic.gather([MINE], letters, held_out=2, max_prompt_tokens=200, seed=0, given=MANY, benchmarks=names)
    held_out = gathered.held_out_ids()
    assert {domain: len(prompts) for domain, prompts in held_out.items()} == {"chat": 2} | dict.fromkeys(names, 80)
    assert {p.domain for p in gathered.train} == {"chat"}
    for prompt in gathered.held_out[2:]:
        assert measuring.found_in([prompt.messages[0]["content"]]), prompt.domain
    with pytest.raises(ValidationError, match="a domain twice"):
        DrafterConfig(traffic=[TrafficSource(domain="gsm8k", source="code")], benchmarks=["gsm8k"])


@pytest.mark.parametrize("source", traffic.COLLECTED)
def test_what_was_collected_may_hold_them_and_is_used_without(source):
    question = max(measuring.questions()["GSM8K"], key=len)
    given = {source: [*asked(*[question] * 5), *MANY["mine"]]}
    gathered = gather([TrafficSource(domain="chat", source=source, prompts=28)], given=given, longest=100_000)
    assert {p.messages[0]["content"] for p in gathered.train + gathered.held_out} == {
        c.messages[0]["content"] for c in MANY["mine"]
    }


@pytest.mark.parametrize("source", ["writing", "code", "mmath", "tools"])
def test_built_in_sources_are_free_of_them(source):
    found = len(sources.conversations(source))
    assert found > 300
    gathered = gather([TrafficSource(domain="d", source=source, prompts=300)], longest=10**6)
    assert len(gathered.train) == 300


def test_jsonl_in_chat_format_becomes_the_turns_that_the_target_answers(tmp_path):
    path = tmp_path / "mine.jsonl"
    said = [("system", "be brief"), ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2")]
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in said]}) + "\n")
    (conversation,) = jsonl.read(path)
    assert [[m["content"] for m in turn] for turn in turns(conversation.messages)] == [["be brief", "one?"], ["two?"]]


def test_a_tool_result_keeps_the_call_it_belongs_to():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    greeting, question = {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "?"}
    result, answer = {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."}
    assert turns([greeting, question, call, result, answer, question]) == [
        [greeting, question, call, result],
        [question],
    ]
    assert turns([question, answer]) == [[question]]
    assert turns([greeting]) == []


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"prompt": "x"}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "king", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line + "\n")
    with pytest.raises(TrafficError, match=r"mine\.jsonl:2 is not OpenAI chat format"):
        jsonl.read(path)


def test_the_chat_template_opens_the_answer(tiny_llama):
    apply = ChatTemplate(tiny_llama)
    one, two = (apply([{"role": "user", "content": text}]) for text in ("Hello", "Goodbye then"))
    assert apply._tokenizer.decode(one).endswith("Hello<|im_end|>\n<|im_start|>assistant\n")
    assert one[-3:] == two[-3:]
    header = apply.user_header()
    assert header == one[: len(header)] and apply._tokenizer.decode(header).endswith("<|im_start|>user\n")


def test_tools_reach_the_prompt_with_a_template_for_them_or_without(tiny_llama, tmp_path):
    conversation = sources.conversations("tools")[0]
    name = conversation.tools[0]["function"]["name"]
    plain = ChatTemplate(tiny_llama)
    text = plain._tokenizer.decode(plain(conversation.messages, conversation.tools))
    assert text.count("<|im_start|>system") == 1 and name in text
    knows = ChatTemplate(with_template(tiny_llama, tmp_path / "tools", TOOL_TEMPLATE))
    text = knows._tokenizer.decode(knows(conversation.messages, conversation.tools))
    assert f"<tools>{json.dumps(conversation.tools[0])}"[:60] in text and '"type": "object"' in text


def with_template(model, folder, template):
    """The tokenizer of `model` with another chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts_of_the_targets_own_are_filtered():
    loop = "tell me " * 20
    texts = ["What is a fjord?", "what is a FJORD ?", "Why?", "1234567890 123 12", loop, "Name three rivers of Asia."]
    assert own.distinct(texts) == ["What is a fjord?", "Name three rivers of Asia."]


def test_traffic_takes_every_prompt_of_the_targets_own_that_fits(tiny_llama, tmp_path):
    template = ChatTemplate(with_template(tiny_llama, tmp_path, TOOL_TEMPLATE))
    question = measuring.conversations("mt_bench")[0].messages[0]["content"]
    texts = [*(f"What is number {n}?" for n in range(20)), "Why is it so long? " * 20, question]
    longest = len(template([{"role": "user", "content": texts[19]}]))
    found = [text for text in texts if own.fits(text, template, longest)]
    assert found == texts[:20]
    assert not own.fits(texts[19], template, longest - 1), "the template counts too"
    source = TrafficSource(domain="chat", source=sources.OWN, prompts=15)
    given = {sources.OWN: asked(*found)}
    taken = traffic.gather([source], template, held_out=5, max_prompt_tokens=longest, seed=0, given=given)
    assert (len(taken.train), len(taken.held_out)) == (15, 5)


def test_what_is_missing_of_own_prompts_is_drawn_at_the_share_that_was_usable():
    assert own.wanted(1000, 0, 0) == own.wanted(1000, 0, 1000) == 1200
    assert own.wanted(1000, 800, 1000) == 300
    assert own.wanted(1000, 1, 1000) == 7000 and own.wanted(1000, 1, 8000) == 0
    assert own.wanted(1000, 1003, 1250) == 0


def test_rollouts_come_with_the_tokens_that_were_sampled(tmp_path):
    sampled = [([10 + i, 11, 12][: 1 + i % 3], i) for i in (1, 2, 4, 4, 5, 6)]
    rows = [
        {"prompt_ids": [1, 2, 3], "token_ids": ids, "finish_reason": "stop", "weight_version": [[i, 0, len(ids)]]}
        for ids, i in sampled
    ]
    (tmp_path / rollouts.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = rollouts.read([tmp_path / "none", tmp_path], "rl", 3, longest=6)
    assert [a.token_ids for a in found] == [[1, 2, 3, 15, 11, 12], [1, 2, 3, 14, 11], [1, 2, 3, 12, 11, 12]]
    assert all(a.answers == [(3, len(a.token_ids))] and a.domain == "rl" for a in found)
    # New weights in the middle of the first answer; two tokens that somebody else said before the second.
    turns = {"prompt_ids": [1, 2], "token_ids": list(range(9)), "finish_reason": "stop"}
    turns["weight_version"] = [[3, 0, 2], [4, 2, 5], [4, 7, 9]]
    (tmp_path / rollouts.FILE).open("a").write(json.dumps(turns) + "\n")
    assert rollouts.read([tmp_path], "rl", 3, longest=99)[0].answers == [(2, 7), (9, 11)]
    assert rollouts.read([tmp_path], "rl", 1, longest=99) == [], "one alone cannot be held out in part"
    assert rollouts.read([tmp_path / "none"], "rl", 9, longest=99) == []


@pytest.mark.parametrize("preset", presets())
def test_presets_ask_for_no_more_prompts_than_there_are(preset, tiny_llama):
    """The tiny model has the tokenizer and the chat template of the one that the presets train."""
    settings = load(DrafterFlowConfig, preset=preset).drafter
    packaged = [source for source in settings.traffic if source.source in sources.NAMES]
    gathered = traffic.gather(
        packaged,
        ChatTemplate(tiny_llama),
        held_out=settings.eval_prompts,
        max_prompt_tokens=settings.max_prompt_tokens,
        seed=settings.seed,
    )
    assert len(gathered.train) == sum(source.prompts for source in packaged)
