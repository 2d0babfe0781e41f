"""Conversations as tokens: what follows a sampled turn is what the template would have put there."""

import pytest
from transformers import AutoTokenizer

from tasks.rl.environments.base import BadEnvironment
from tasks.rl.environments.chat import Chat, tool_calls

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
SAID = {"role": "assistant", "content": "It is 4."}
NEXT = [{"role": "user", "content": "And 3 + 3?"}]


@pytest.fixture(scope="module")
def tokenizer(smol):
    return AutoTokenizer.from_pretrained(smol)


@pytest.mark.parametrize("ending", ["<|im_end|>", ""])
def test_a_conversation_goes_on_token_for_token(tokenizer, ending):
    """Whether the turn ended by itself or was cut off at the limit."""
    chat = Chat(tokenizer)
    sampled = tokenizer("It is 4." + ending, add_special_tokens=False).input_ids
    ids = chat.prompt(ASKED) + sampled
    assert ids + chat.reply(NEXT, sampled[-1]) == chat.prompt([*ASKED, SAID, *NEXT])


def test_a_system_prompt_is_put_where_there_is_none(tokenizer):
    assert Chat(tokenizer, "Be brief.").prompt(ASKED[1:]) == Chat(tokenizer).prompt(ASKED)
    assert Chat(tokenizer, "Be long.").prompt(ASKED) == Chat(tokenizer).prompt(ASKED)


def test_a_template_that_refuses_a_conversation_is_named(tokenizer):
    strict = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    strict.chat_template = "{{ raise_exception('no system messages here') }}"
    with pytest.raises(BadEnvironment, match=r"template refuses a conversation of system, user: no system messages"):
        Chat(strict).prompt(ASKED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", ("4", [])),
        (
            'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": {"b": 1}}}\n</tool_call>',
            ("Let me see.", [("add", '{"a": {"b": 1}}')]),
        ),
        ('<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "x", "arguments": {}}</tool_call>',
         ("", [("now", "{}"), ("x", "{}")])),
        ('<tool_call>{"name": </tool_call>', ('<tool_call>{"name": </tool_call>', [])),
        ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    ],
)  # fmt: skip
def test_calls_of_tools_are_read(text, expected):
    assert tool_calls(text) == expected
