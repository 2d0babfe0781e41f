"""The one line that a log of hundreds comes down to."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from infra.engine.failure import _FORKED, _PASSING, doing, passing, root_cause, unforkable

WORKER = "(Worker pid=7) ERROR 11-29 19:49:20 [multiproc_executor.py:953] "
CORE = "(EngineCore pid=6) ERROR 11-29 19:49:22 [core.py:1510] "
SERVER = "(APIServer pid=5) "

LOGS = {
    "a worker's exception, echoed by the processes above it": (
        f"""{WORKER}Traceback (most recent call last):
{WORKER}  File "worker.py", line 1, in load
{WORKER}KeyError: 'model.layers.0.weight'
{CORE}Traceback (most recent call last):
{CORE}Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace.
{SERVER}Traceback (most recent call last):
{SERVER}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
""",
        "KeyError: 'model.layers.0.weight'",
    ),
    "pydantic, whose reason is on the next line": (
        f"""{SERVER}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
{SERVER}  Value error, Model architectures ['Nothing'] are not supported. [type=value_error, input_value=ArgsKwargs(())]
{SERVER}    For further information visit https://errors.example
""",
        "ValidationError: Model architectures ['Nothing'] are not supported.",
    ),
    "too little memory": (
        f"{WORKER}ValueError: Available memory on node 0 (1/2 GiB) on kv cache allocation is less than requested.\n",
        "ValueError: Available memory on node 0 (1/2 GiB) on kv cache allocation is less than requested.; "
        "lower engine.kv_cache_gib, or free memory",
    ),
    "a GPU that others fill": (
        f"{CORE}ValueError: Free memory on device cuda:0 (20/139 GiB) on startup is less than desired GPU memory "
        "utilization (0.3, 41 GiB). Decrease GPU memory utilization.\n",
        "ValueError: Free memory on device cuda:0 (20/139 GiB) on startup is less than desired GPU memory "
        "utilization (0.3, 41 GiB). Decrease GPU memory utilization.; "
        "lower engine.gpu_memory_fraction, or free memory of the GPU",
    ),
    "a flag": ("usage: vllm [-h]\nvllm: error: unrecognized arguments: --nope\n", "unrecognized arguments: --nope"),
    "no exception at all": ("Killed\n\n", "Killed"),
    "nothing": ("", "it wrote nothing"),
}


@pytest.mark.parametrize("name", LOGS)
def test_root_cause(tmp_path, name):
    text, cause = LOGS[name]
    log = tmp_path / "log"
    log.write_text(text)
    assert root_cause(log, gpus=False) == cause


@pytest.mark.parametrize(
    ("gpus", "hint"),
    [
        (False, "raise engine.kv_cache_gib"),
        (
            True,
            "raise engine.gpu_memory_fraction, or start it while others on the GPU take no memory: what they take "
            "meanwhile counts as the engine's",
        ),
    ],
)
def test_a_hint_names_the_setting_that_decides_there(tmp_path, gpus, hint):
    log = tmp_path / "log"
    log.write_text(f"{CORE}ValueError: No available memory for the cache blocks. Try increasing it.\n")
    assert root_cause(log, gpus=gpus).endswith(f"Try increasing it.; {hint}")


def test_a_cause_that_passes_is_told_from_one_that_stays(tmp_path):
    vllm = Path(find_spec("vllm").submodule_search_locations[0])
    assert all(sign in (vllm / "v1/worker/gpu_worker.py").read_text() for sign in _PASSING), "vLLM has other words"
    log = tmp_path / "log"
    log.write_text(f"{CORE}AssertionError: {_PASSING[0]}. Initial free memory 97.1 GiB, current free 99.0 GiB.\n")
    assert passing(root_cause(log))
    assert not any(passing(cause) for _, cause in LOGS.values())


def test_a_cause_that_a_fork_has_is_told_from_others(tmp_path):
    torch = Path(find_spec("torch").submodule_search_locations[0])
    assert _FORKED[0] in (torch / "cuda/__init__.py").read_text(), "torch has other words"
    log = tmp_path / "log"
    for words in (
        f"RuntimeError: Cannot re-initialize {_FORKED[0]}. To use it,",
        f"torch.AcceleratorError: {_FORKED[1]}",
    ):
        log.write_text(
            f"{CORE}{words}\n{SERVER}RuntimeError: Engine core initialization failed. See root cause above\n"
        )
        assert unforkable(root_cause(log))
    assert not any(unforkable(cause) for _, cause in LOGS.values())


def test_doing_is_vllms_last_word_on_its_progress(tmp_path):
    log = tmp_path / "log"
    log.write_text("nothing of interest\n")
    assert doing(log) == "starting its processes"
    log.write_text(
        "(Worker pid=25317) INFO 11-29 19:49:19 [default_loader.py:501] Loading weights took 0.04 seconds\n"
        "(APIServer pid=1) INFO 11-29 19:49:20 [api_utils.py:347] \n"
        "(APIServer pid=1) INFO 11-29 19:49:20 [router.py:9] X is disabled. Restart vllm serve with --enable-x.\n"
        "(APIServer pid=1) WARNING 11-29 19:49:20 [routers.py:7] SECURITY WARNING: frightening\n"
    )
    assert doing(log) == "Loading weights took 0.04 seconds"
    config = (
        f"Initializing a V1 LLM engine (v0.32.0) with config: model='/m', {', '.join(f'a{n}={n}' for n in range(99))}"
    )
    log.write_text(
        f"(EngineCore pid=1) INFO 11-29 19:49:21 [core.py:133] {config}\n"
        "(APIServer pid=1) INFO 11-29 19:49:22 [launcher.py:195] Route: /docs, Methods: GET, HEAD\n"
    )
    assert doing(log).startswith("Initializing a V1 LLM engine (v0.32.0) with config") and len(doing(log)) <= 100
