"""Whole RL runs on real vLLM: a tiny model learns, goes on after a kill as if nothing had happened, and runs ahead."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import rl_letters
import torch
from safetensors.torch import load_file

from infra.config.flows import RLFlowConfig
from infra.config.rl import JsonlEnvironment, MismatchBounds, RLConfig
from infra.config.target import ClusterConfig, EngineConfig
from tasks.rl.journal import Journal
from tasks.rl.lengths import Lengths
from tasks.rl.result import ROLLOUTS, STEPS, RLResult
from tasks.rl.run import train_policy

TESTS = Path(__file__).resolve().parents[1]
AHEAD = dict(max_staleness=2, lr=1e-3, mismatch=MismatchBounds(stop_k3=100.0))
"""What the policy moves in two steps counts as mismatch: how far depends on who samples when, and must stop no run."""


@pytest.fixture(scope="module")
def letters(tmp_path_factory, monkeypatch_module) -> tuple[Path, Path]:
    """Model folder and prompts."""
    folder = tmp_path_factory.mktemp("letters")
    # scorers run in processes of their own, which find the test's scorer here
    monkeypatch_module.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    return rl_letters.write_model(folder / "model"), rl_letters.write_prompts(folder / "prompts.jsonl")


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def settings(prompts: Path, ranks: int = 1, dtype: str = "float32", **rl) -> RLFlowConfig:
    common = dict(
        environments=[JsonlEnvironment(label="letters", path=str(prompts), scorer="rl_letters:next_letter")],
        general_questions=[],
        scorer_processes=1,
        scorer_timeout_s=600,
        prompts_per_step=16,
        group_size=8,
        max_new_tokens=1,
        lr=3e-3,
        lr_warmup_steps=5,
        updates_per_step=3,
    )
    return RLFlowConfig(
        engine=EngineConfig(
            dtype=dtype,
            cpu_threads=1,
            kv_cache_gib=0.1,
            max_model_len=32,
            max_concurrent_sequences=128,
            max_batched_tokens=512,
        ),
        cluster=ClusterConfig(trainer_threads=1, trainer_ranks=ranks),
        rl=RLConfig(**common | {"trainer_dtype": dtype} | rl),
    )


def steps(result: RLResult) -> pd.DataFrame:
    return pd.read_parquet(result.tables / STEPS)


def killed(model: Path, config: RLFlowConfig, workdir: Path, when: str) -> None:
    """Run in another process, killed as soon as it says `when`."""
    script = (
        "import logging, sys; from pathlib import Path; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from infra.config.flows import RLFlowConfig; from tasks.rl.run import train_policy\n"
        "train_policy(Path(sys.argv[1]), RLFlowConfig.model_validate_json(sys.argv[2]), Path(sys.argv[3]))\n"
    )
    workdir.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", script, str(model), config.model_dump_json(), str(workdir)],
        stdout=subprocess.PIPE,
        text=True,
    )
    seen = []
    for line in process.stdout:
        seen.append(line)
        if when in line:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL, "".join(seen)


def test_a_tiny_model_learns_what_it_could_not_do(letters, tmp_path):
    model, prompts = letters
    ranks = min(2, len(os.sched_getaffinity(0)))
    result = train_policy(model, settings(prompts, ranks, steps=32, checkpoint_every=16), tmp_path)
    (held_out,) = result.held_out
    table = steps(result)
    assert len(held_out.before) == 64
    assert sum(held_out.before) / 64 < 0.3  # what a constant answer scores at most
    assert table["reward_mean"][0] < 0.2
    assert sum(held_out.after) / 64 > 0.9
    assert table["reward_mean"].iloc[-4:].mean() > 0.9
    assert table["k3"].max() < 1e-6  # what the ranks hold together is what the engine got
    assert (table["stale"] == 0).all() and (table["failed"] == 0).all()
    rows = [json.loads(line) for line in (result.tables / ROLLOUTS).read_text().splitlines()]
    trained = {row["prompt"] for row in rows}
    expected = [rl_letters.following(row["prompt"][-1]) for row in rows]
    assert [row["expected"] for row in rows] == expected
    assert max(expected.count(letter) for letter in rl_letters.LETTERS) / len(expected) < 0.3
    assert len(trained) > 100


def test_a_run_that_was_killed_ends_bit_for_bit_where_an_unbroken_one_ends(letters, tmp_path):
    """Four steps at a temperature, several tokens an answer; the other process is killed while it trains the third."""
    model, prompts = letters
    config = settings(prompts, steps=4, prompts_per_step=4, max_new_tokens=5, temperature=0.7, updates_per_step=2)
    whole = train_policy(model, config, tmp_path / "whole")

    broken = tmp_path / "broken"
    killed(model, config, broken, "step 3 of 4: training")
    committed = sorted(path.name for path in (broken / "checkpoints").glob("step-*"))
    assert committed in (["step-000001"], ["step-000001", "step-000002"])  # the second may still be written

    told = []
    resumed = train_policy(model, config, broken, on_step=lambda step, figures: told.append(step))
    assert told == list(range(len(committed), 5))
    expected, weights = (load_file(r.model / "model.safetensors") for r in (whole, resumed))
    assert expected.keys() == weights.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, weights[name]), name
    assert resumed.held_out == whole.held_out
    exact = ["step", "reward_mean", "loss", "grad_norm", "k1", "k3", "ess", "entropy", "tokens"]
    pd.testing.assert_frame_equal(steps(whole)[exact], steps(resumed)[exact], check_exact=True)
    assert steps(whole)["k3"].max() < 1e-6  # the engine's log-probs are those at the temperature
    assert (resumed.tables / ROLLOUTS).read_text() == (whole.tables / ROLLOUTS).read_text()


def test_rollouts_run_ahead_within_the_staleness_bound(letters, tmp_path):
    model, prompts = letters
    carried = dict(oversampling=1.25, stragglers="carry")  # what a step leaves goes on under the next weights
    config = settings(prompts, steps=8, max_new_tokens=8, checkpoint_every=8, transport="store", **AHEAD, **carried)
    lengths = Lengths(24)
    result = train_policy(model, config, tmp_path, lengths=lengths)
    table = steps(result)
    assert table["staleness_max"].max() in (1, 2)
    assert (table["stale"] == 0).all() and (table["groups"] == 16).all()
    assert table[["engine_idle_share", "trainer_idle_share", "decode_share"]].stack().dropna().between(0, 1).all()
    assert table.loc[table["staleness_max"] > 0, "k3"].max() > 1e-7  # an old policy sampled: the log-ratios say so
    rows = [json.loads(line) for line in (result.tables / ROLLOUTS).read_text().splitlines()]
    assert {row["num_tokens"] for row in rows} <= set(lengths.drawn) and max(row["num_tokens"] for row in rows) > 8
    for row in rows:  # what was sampled past an answer's end is no part of it
        own = sum(end - start for _, start, end in row["weight_version"])
        assert own == min(8, row["num_tokens"]) or row["token_ids"][own - 1] == rl_letters.TOKENS.index("<eos>")


def test_a_killed_asynchronous_run_loses_no_finished_group_and_trains_on_none_twice(letters, tmp_path):
    """Its last checkpoint is older than the groups that had finished: those of steps 3 to 6."""
    model, prompts = letters
    config = settings(prompts, steps=6, prompts_per_step=4, max_new_tokens=6, checkpoint_every=2, **AHEAD)
    killed(model, config, tmp_path / "broken", "step 4 of 6: training")
    journal = Journal(tmp_path / "broken" / "groups")
    finished = {number: journal.read(number).groups for number in journal.rounds()}
    assert len(finished[3]) == 4  # the step it was killed in

    result = train_policy(model, config, tmp_path / "broken")
    rows = [json.loads(line) for line in (result.tables / ROLLOUTS).read_text().splitlines()]
    assert len(rows) == 6 * 4 * 8
    for number in (2, 3, 4, 5):  # steps that the checkpoint of step 2 does not hold
        for place, rollouts in finished.get(number, {}).items():
            trained = [row for row in rows if row["step"] == number + 1][8 * place : 8 * place + 8]
            assert [(r["answer"], r["reward"], r["weight_version"]) for r in trained] == [
                (r["text"], r["reward"], r["versions"]) for r in rollouts
            ]
    by_step = [{row["prompt"] for row in rows if row["step"] == step} for step in range(1, 7)]
    assert sum(map(len, by_step)) == len(set().union(*by_step)) == 24
    assert (steps(result)["stale"] == 0).all()


def test_a_float32_head_follows_the_policy_in_bfloat16(letters, tmp_path):
    """Matched numerics: the head that the engine computes beside its kernels gets every update too. Held-out problems
    are answered several times here: their reward is what an answer is worth on average."""
    model, prompts = letters
    evaluated = dict(eval_every=3, eval_answers=4, eval_temperature=1.0)
    config = settings(prompts, dtype="bfloat16", numerics="matched", steps=3, max_new_tokens=4, lr=1e-2, **evaluated)
    result = train_policy(model, config, tmp_path)
    (held_out,), table = result.held_out, steps(result)
    rewards = held_out.before + held_out.after
    assert all((4 * reward).is_integer() for reward in rewards) and set(rewards) - {0.0, 1.0}
    # in bfloat16 what else is in a batch may decide an answer, and who is in it is chance
    assert table["eval_reward_letters"].iloc[-1] == pytest.approx(sum(held_out.after) / len(held_out.after), abs=0.05)
    assert table["mean_abs"].max() < 0.02  # a head one step old is off by more than that
    assert table["k3"].max() < 1e-3
