"""Episodes of a verifiers environment on real vLLM: turns, tools, and what of them a policy is trained on."""

import json
import os
from pathlib import Path

import pytest
import rl_letters

from infra.config.flows import RLFlowConfig
from infra.config.rl import RLConfig, VerifiersEnvironment
from infra.config.target import ClusterConfig, EngineConfig
from tasks.rl.environments.base import BadEnvironment
from tasks.rl.environments.make import make
from tasks.rl.result import ROLLOUTS
from tasks.rl.run import train_policy

TESTS = Path(__file__).resolve().parents[1]
CALL = '<tool_call>{"name":"%s","arguments":{"letter":"%s"}}</tool_call>'
# A call is one token, so that a random model makes some; the last names a tool that there is not.
TOKENS = [*rl_letters.TOKENS[:-4], *(CALL % ("following", letter) for letter in "abc"), CALL % ("absent", "a")]


def test_a_policy_is_trained_on_its_own_tokens_of_every_turn(tmp_path, monkeypatch):
    # the environment and its tool server are found by name, in processes of their own
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(TESTS)
    model = rl_letters.write_model(tmp_path / "model", tokens=TOKENS)
    config = RLFlowConfig(
        engine=EngineConfig(
            cpu_threads=1, kv_cache_gib=0.1, max_model_len=64, max_concurrent_sequences=32, max_batched_tokens=512
        ),
        cluster=ClusterConfig(trainer_threads=1),
        rl=RLConfig(
            environments=[VerifiersEnvironment(taskset="letter_game", params={"count": 16})],
            general_questions=[],
            eval_prompts=2,
            steps=1,
            prompts_per_step=10,
            group_size=4,
            max_new_tokens=16,
            eval_every=1,
        ),
    )
    rows: dict[int, dict] = {}
    result = train_policy(model, config, tmp_path / "run", on_step=lambda step, figures: rows.update({step: figures}))
    assert rows[1]["k3"] < 1e-6  # the trainer reads the conversation that the engine read
    assert rows[1]["turns_mean"] > 1 and rows[1]["rewritten"] == 0
    assert rows[1]["eval_version"] == 1

    told = [json.loads(line) for line in (result.tables / ROLLOUTS).read_text().splitlines()]
    broken = [row for row in told if row["prompt"].startswith("h")]
    assert all(row["reward"] is None and "no reward for an h" in row["error"] for row in broken)
    assert rows[1]["failed"] == len(broken) > 0
    assert {row["reward"] for row in told} - {None} <= {0.0, 0.5, 1.0}
    used = [row for row in told if row["reward"] == 1.0]
    assert used
    for row in used:
        own = [token for _, start, end in row["weight_version"] for token in range(start, end)]
        assert len(own) <= 16 and own == sorted(set(own))
        assert row["num_tokens"] - len(own) >= 3  # what the tool said, and the user's two letters
        assert " c d" in row["answer"]
    absent = [row for row in told if CALL % ("absent", "a") in row["answer"]]
    assert any("<unk>" in row["answer"] or row["num_tokens"] > 16 for row in absent)  # it is told, and goes on


def test_environments_that_cannot_be_loaded_say_why():
    for environment, message in (
        (VerifiersEnvironment(taskset="no_such_taskset"), "no_such_taskset.* not found"),
        (
            VerifiersEnvironment(taskset="letter_game", params={"counts": 3}),
            "letter_game refuses .*counts",
        ),
    ):
        with pytest.raises(BadEnvironment, match=message) as error:
            make([environment], 0)
        assert "\n" not in str(error.value)
