import os
import threading

import pytest

from infra.cluster.connection import ADDRESS_VARIABLE
from infra.cluster.placement import PlacementError
from infra.cluster.session import Session, handed_on
from infra.cluster.session import session as shared_session
from infra.engine.errors import EngineError
from infra.engine.spec import EngineSpec, Role


def worker_class() -> type:
    """A class that travels by value: Ray's workers cannot import tests."""

    class Worker:
        def __init__(self, number: int) -> None:
            self.number = number

        def pid(self) -> int:
            return os.getpid()

        def threads(self) -> str:
            return os.environ["OMP_NUM_THREADS"]

        def variable(self, name: str) -> str | None:
            return os.environ.get(name)

        def fail(self) -> None:
            raise ValueError(f"worker {self.number} says why")

    return Worker


Worker = worker_class()


@pytest.fixture(scope="module")
def session():
    shared_session().close()  # a process has one Ray, and earlier tests may have left it open
    opened = Session()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        # Ray must outlive the thread that happened to use it first.
        first = threading.Thread(target=opened.resources)
        first.start()
        first.join()
        yield opened
        opened.close()


def test_a_worker_has_a_process_and_threads_of_its_own(session):
    worker = session.actor(Worker, 7, threads=3)
    assert session.result(worker.pid.remote()) != os.getpid()
    assert session.result(worker.threads.remote()) == "3"
    assert session.result(worker.variable.remote("NCCL_NVLS_ENABLE")) == "0"


def test_a_workers_exception_arrives_as_it_was(session):
    worker = session.actor(Worker, 7)
    with pytest.raises(ValueError, match="^worker 7 says why$"):
        session.result(worker.fail.remote())


def test_devices_are_free_again_when_a_worker_is_let_go(session):
    every = session.resources().cpus
    for number in range(2):
        worker = session.actor(Worker, number, cpus=every)
        session.result(worker.pid.remote())
        del worker


def test_a_worker_that_cannot_fit_is_refused_at_once(session):
    with pytest.raises(PlacementError, match="needs 4096 CPUs and 0 GPUs, the whole cluster has"):
        session.actor(Worker, 7, cpus=4096)


def test_engines_are_started_watched_and_stopped(session, tiny_llama, tiny_engine_config):
    told = []
    spec = EngineSpec(model=tiny_llama, role=Role.eval, config=tiny_engine_config)
    with session.engine(spec, progress=told.append) as handle:
        assert session.alive(handle) and handle.role is Role.eval
        with session.engine(spec) as second:
            assert second.url != handle.url
        assert session.alive(handle)
    assert len(told) == len(set(told))


def test_an_engine_that_cannot_start_says_why(session, tmp_path, tiny_engine_config):
    spec = EngineSpec(model=tmp_path / "none", role=Role.eval, config=tiny_engine_config)
    with pytest.raises(EngineError, match="none is not a folder"), session.engine(spec):
        pass


def test_workers_of_a_cluster_get_what_their_links_need_and_no_secrets(monkeypatch):
    for name in ("NCCL_NVLS_ENABLE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "HF_HOME", "HF_TOKEN", "UNRELATED"):
        monkeypatch.setenv(name, "1")
    handed = handed_on()
    assert {"NCCL_NVLS_ENABLE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "HF_HOME"} <= set(handed)
    assert not {"HF_TOKEN", "UNRELATED"} & set(handed)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_cluster_that_does_not_answer_is_named(monkeypatch, address):
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    with pytest.raises(PlacementError, match=f"no Ray cluster answers at {address} .*unset {ADDRESS_VARIABLE}"):
        Session().resources()
