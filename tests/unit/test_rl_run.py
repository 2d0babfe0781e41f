"""What is refused before anything is started, and how prompts become tokens."""

import json

import pytest
import rl_letters
from transformers import AutoTokenizer

from infra.config.flows import RLFlowConfig
from infra.config.rl import JsonlEnvironment, RLConfig
from tasks.rl.environments.base import BadEnvironment, Problem
from tasks.rl.environments.chat import Chat
from tasks.rl.run import train_policy
from tasks.rl.sampler import PromptTooLong, Sampler


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(rl_letters.write_model(tmp_path_factory.mktemp("letters")))


def worker(tokenizer, system_prompt: str | None = None) -> Sampler:
    limits = dict(max_new_tokens=4, max_model_len=12)
    return Sampler(None, None, None, Chat(tokenizer, system_prompt), **limits)


def problem(text: str) -> Problem:
    return Problem("letters", 7, ({"role": "user", "content": text},))


def test_prompts_go_through_the_chat_template_where_there_is_one(tokenizer):
    assert worker(tokenizer).prompt_ids(problem("a c h")) == [0, 2, 7]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {{ eos_token }} {% endfor %}b"
    try:
        assert worker(tokenizer).prompt_ids(problem("a c")) == [0, 2, 8, 1]
        assert worker(tokenizer, system_prompt="h").prompt_ids(problem("a c")) == [7, 8, 0, 2, 8, 1]
    finally:
        tokenizer.chat_template = None


def test_an_answer_that_was_sampled_on_ends_where_it_would_have(tokenizer):
    chat = Chat(tokenizer)
    assert chat.end([0, 2, 8, 1, 8], most=10) == (3, "stop")  # 8 ends a sequence
    assert chat.end([0, 2, 8, 1, 8], most=2) == (2, "length")
    assert chat.end([0, 2], most=10) == (2, "length")


def test_a_prompt_that_leaves_no_room_for_the_answer_is_named(tokenizer):
    assert len(worker(tokenizer).prompt_ids(problem(" ".join("abcdefgh")))) == 8
    with pytest.raises(PromptTooLong, match=r"problem 7 of letters has 9 tokens.*engine.max_model_len=12"):
        worker(tokenizer).prompt_ids(problem(" ".join("abcdefgha")))


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    for scorer, message in (
        ("no_such_module:score", "scorer no_such_module:score cannot be imported"),
        ("rl_letters:next_letter", "no held-out problem: raise rl.held_out_share"),
    ):
        environment = JsonlEnvironment(path=str(prompts), scorer=scorer)
        with pytest.raises(BadEnvironment, match=message):
            train_policy(tmp_path, RLFlowConfig(rl=RLConfig(environments=[environment])), tmp_path)
