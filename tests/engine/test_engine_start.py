"""An engine that cannot start says why in one line, and leaves nothing behind."""

import json
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest

from infra.config.target import EngineConfig
from infra.engine.errors import EngineError
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role, Speculation


def refusal(tmp_path, model, **changes) -> str:
    config = EngineConfig(
        **({"cpu_threads": 1, "kv_cache_gib": 0.25, "max_model_len": 512} | changes.pop("config", {}))
    )
    with pytest.raises(EngineError) as error:
        start(EngineSpec(model=model, role=Role.eval, config=config, **changes), tmp_path / "logs").stop()
    message = str(error.value)
    assert "\n" not in message
    return message


def disturbed(model, tmp_path, **config) -> str:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_port_in_use(tiny_llama, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refusal(tmp_path, tiny_llama, port=port)


def test_an_address_of_another_machine(tiny_llama, tmp_path):
    assert "cannot listen on 203.0.113.1" in refusal(tmp_path, tiny_llama, host="203.0.113.1")


def test_a_folder_that_is_not_a_model(tmp_path):
    assert "has no config.json" in refusal(tmp_path, tmp_path)
    assert "is not a folder" in refusal(tmp_path, tmp_path / "absent")


def test_a_drafter_that_is_not_a_model(tiny_llama, tmp_path):
    absent = Speculation(method="eagle3", model=tmp_path / "absent", num_speculative_tokens=2)
    assert "absent is not a folder" in refusal(tmp_path, tiny_llama, speculation=absent)


def test_an_architecture_nobody_knows(tiny_llama, tmp_path):
    model = disturbed(tiny_llama, tmp_path, architectures=["LlamaForNothing"])
    assert "LlamaForNothing" in refusal(tmp_path, model)


def test_weights_that_do_not_fit_the_config(tiny_llama, tmp_path):
    model = disturbed(tiny_llama, tmp_path, intermediate_size=512)
    message = refusal(tmp_path, model)
    assert "the eval engine ended with code 1: " in message and "Engine core initialization failed" not in message
    assert "size" in message or "shape" in message


def test_more_context_than_the_model_has(tiny_llama, tmp_path):
    message = refusal(tmp_path, tiny_llama, config={"max_model_len": 4096})
    assert "2048" in message and "lower engine.max_model_len" in message


def test_too_little_memory(tiny_llama, tmp_path):
    message = refusal(tmp_path, tiny_llama, config={"kv_cache_gib": 100_000.0})
    assert "lower engine.kv_cache_gib" in message


def test_a_kv_cache_too_small_for_one_sequence(tiny_llama, tmp_path):
    assert "raise engine.kv_cache_gib" in refusal(tmp_path, tiny_llama, config={"kv_cache_gib": 1e-3})


def test_a_flag_that_does_not_exist(tiny_llama, tmp_path):
    message = refusal(tmp_path, tiny_llama, config={"extra_flags": ["--no-such-flag"]})
    assert "unrecognized arguments: --no-such-flag" in message


def test_a_models_class_is_looked_at_in_a_fork_and_where_that_fails_in_a_process_of_its_own():
    """The first start of an architecture on a machine."""
    script = """
        import os
        from infra.engine import nursery
        from vllm.model_executor.models import registry
        registry._run_in_subprocess = lambda function: "executed"
        nursery._fork_to_inspect()
        here = os.getpid()
        print(registry._run_in_subprocess(os.getppid) == here, registry._run_in_subprocess(lambda: 1 / 0))
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert told.stdout.splitlines()[-1] == "True executed", told.stderr
