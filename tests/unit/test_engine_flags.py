"""The command line and environment of each role."""

import json
import os
import tempfile
import uuid
from pathlib import Path

import pytest

from infra.config.target import EngineConfig
from infra.engine import flags
from infra.engine.spec import Capture, EngineHandle, EngineSpec, Role, Speculation


def spec(tmp_path, role=Role.eval, **changes) -> EngineSpec:
    if role is Role.capture:
        changes["capture"] = Capture(layer_ids=[2, 4], folder=tmp_path / "states")
    return EngineSpec(model=tmp_path / "model", role=role, **changes)


def value(arguments: list[str], name: str):
    (found,) = [a.removeprefix(f"{name}=") for a in arguments if a.startswith(f"{name}=")]
    return json.loads(found)


@pytest.mark.parametrize("role", Role)
def test_only_rollout_and_capture_get_rl_endpoints(tmp_path, role):
    arguments, env = flags.arguments(spec(tmp_path, role)), flags.environment(spec(tmp_path, role), "key", tmp_path)
    exposed = role in (Role.rollout, Role.capture)
    assert (env["VLLM_SERVER_DEV_MODE"] == "1") == exposed
    assert ("--enable-scale-out" in arguments) == exposed
    assert any(a.startswith("--weight-transfer-config") for a in arguments) == exposed
    assert "--middleware=infra.engine.middleware.KeyGuard" in arguments


def test_an_inherited_variable_opens_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "other")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    env = flags.environment(spec(tmp_path, Role.serve), "key", tmp_path)
    assert env["VLLM_SERVER_DEV_MODE"] == "0" and "VLLM_API_KEY" not in env
    assert env["NCCL_NVLS_ENABLE"] == "0"  # what a machine's links must not use is handed on


def test_the_key_is_in_the_environment_and_not_on_the_command_line(tmp_path):
    assert flags.environment(spec(tmp_path), "a-secret", tmp_path)[flags.KEY_VARIABLE] == "a-secret"
    assert not any("a-secret" in a for a in flags.arguments(spec(tmp_path)))


def test_matched_numerics_ask_for_a_float32_head_and_on_gpus_for_batch_invariance(tmp_path, monkeypatch):
    matched = spec(tmp_path, Role.rollout, matched=True)
    assert value(flags.arguments(matched), "--hf-overrides") == {"head_dtype": "float32"}
    assert "VLLM_BATCH_INVARIANT" not in flags.environment(matched, "key", tmp_path)
    monkeypatch.setattr(flags, "accelerated", lambda: True)
    assert flags.environment(matched, "key", tmp_path)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in flags.environment(spec(tmp_path, Role.rollout), "key", tmp_path)


def test_threads_never_exceed_the_cores(tmp_path):
    many = EngineConfig(cpu_threads=512)
    assert flags.threads(spec(tmp_path, config=many)) == len(os.sched_getaffinity(0))
    one = spec(tmp_path, config=EngineConfig(cpu_threads=1))
    assert flags.environment(one, "key", tmp_path)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("length", [5, flags.LONGEST_TEMPORARY, flags.LONGEST_TEMPORARY + 1])
def test_sockets_of_an_engine_have_paths_that_the_kernel_takes(monkeypatch, length):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as usual:
        folder = Path(usual) / ("x" * (length - len(usual) - 1)) if length > len(usual) else Path("/tmp")
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        scratch = flags.make_scratch()
        scratch.rmdir()
        assert scratch.parent == (folder if length <= flags.LONGEST_TEMPORARY else Path("/tmp"))
        assert len(f"{scratch}/{uuid.uuid4()}") <= 107


def test_speculation_and_capture(tmp_path):
    drafted = Speculation(method="eagle3", model=tmp_path / "head", num_speculative_tokens=3)
    config = value(flags.arguments(spec(tmp_path, speculation=drafted)), "--speculative-config")
    assert config["method"] == "eagle3" and config["num_speculative_tokens"] == 3
    assert config["model"] == str(tmp_path / "head")

    arguments = flags.arguments(spec(tmp_path, Role.capture, config=EngineConfig(eager=False)))
    assert "--enforce-eager" in arguments, "it only reads, and graphs are of decode steps"
    config = value(arguments, "--speculative-config")
    assert config["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 4]}
    connector = value(arguments, "--kv-transfer-config")
    assert connector["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path / "states")
    assert "--no-enable-prefix-caching" in arguments


def test_the_users_own_flags_come_last(tmp_path):
    own = EngineConfig(extra_flags=["--block-size=64"])
    assert flags.arguments(spec(tmp_path, config=own))[-1] == "--block-size=64"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(role="eval", capture=dict(layer_ids=[1], folder="x")), "if and only if its role is capture"),
        (dict(role="capture"), "if and only if its role is capture"),
        (dict(role="eval", speculation=dict(method="eagle3", num_speculative_tokens=1)), "needs its drafter's folder"),
        (
            dict(
                role="capture",
                capture=dict(layer_ids=[1], folder="x"),
                speculation=dict(method="ngram", num_speculative_tokens=1),
            ),
            "cannot speculate",
        ),
    ],
)
def test_specs_that_make_no_sense(wrong, message):
    with pytest.raises(ValueError, match=message):
        EngineSpec(model="m", **wrong)


def test_a_handle_crosses_processes_as_json():
    handle = EngineHandle(url="http://127.0.0.1:1", key="k", model="m", role=Role.serve, accelerated=False)
    assert EngineHandle.model_validate_json(handle.model_dump_json()) == handle
