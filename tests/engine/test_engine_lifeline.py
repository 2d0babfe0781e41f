"""Nothing of an engine survives its owner, its API server, or `stop`."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from infra.config.target import EngineConfig
from infra.engine.errors import EngineError
from infra.engine.launch import start, warm_up
from infra.engine.spec import EngineSpec, Role

OWNER = """
import sys, time
from pathlib import Path
from infra.config.target import EngineConfig
from infra.engine.launch import start, warm_up
from infra.engine.spec import EngineSpec
warm_up(Path(sys.argv[2]), *sys.argv[3:])
engine = start(EngineSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
print(engine.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spec(tiny_llama, tiny_engine_config) -> EngineSpec:
    return EngineSpec(model=tiny_llama, role=Role.eval, config=tiny_engine_config)


def processes(api_server: int) -> list[psutil.Process]:
    """The guardian, the API server, EngineCore and the worker."""
    server = psutil.Process(api_server)
    found = [server.parent(), server, *server.children(recursive=True)]
    assert len(found) >= 4, found
    return found


def assert_gone(found: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(found, timeout=600)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_stop_ends_every_process_and_frees_shared_memory_and_nobody_was_told_the_key(spec, tmp_path):
    with start(spec, tmp_path) as engine:
        found = processes(engine.pid)
        bound = {c.laddr for process in found for c in process.net_connections("unix") if c.laddr.startswith("/")}
        (scratch,) = {Path(path).parent for path in bound}
        assert not [process for process in found if engine.key in " ".join(process.cmdline())]
        shared = {m.path for p in found for m in p.memory_maps() if m.path.startswith("/dev/shm/")}
        assert engine.alive() and any("/lockstep-" in path for path in shared), shared
    assert not engine.alive()
    assert_gone(found)
    assert not [path for path in shared if os.path.exists(path)]
    assert not scratch.exists()
    assert engine.key not in engine.log.read_text()


def owner_of(spec: EngineSpec, log_dir: Path, *nursery: str, **env: str) -> subprocess.Popen:
    """A process that tells the pid of its engine's API server and then waits. nursery: address of one to use."""
    command = [sys.executable, "-c", OWNER, spec.model_dump_json(), str(log_dir), *nursery]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env)


def test_a_killed_owner_takes_its_engine_along(spec, tmp_path):
    with (
        tempfile.TemporaryDirectory() as temporary,
        owner_of(spec, tmp_path, TMPDIR=temporary) as owner,
    ):
        found = processes(int(owner.stdout.readline()))
        assert os.listdir(temporary)
        found += psutil.Process(owner.pid).children()  # the nursery
        owner.send_signal(signal.SIGKILL)
        assert_gone(found)
        assert os.listdir(temporary) == []


def test_processes_share_the_nursery_whose_address_they_are_told_and_it_may_die(spec, tmp_path):
    with start(spec, tmp_path) as engine:
        nursery = processes(engine.pid)[0].parent()
        with owner_of(spec, tmp_path, address := warm_up()) as owner:
            theirs = processes(int(owner.stdout.readline()))
            assert theirs[0].parent() == nursery
            owner.kill()
            assert_gone(theirs)
        nursery.kill()
        assert_gone([nursery])
        assert engine.alive()
    with owner_of(spec, tmp_path, address) as owner:
        theirs = processes(int(owner.stdout.readline()))
        assert theirs[0].parent() in psutil.Process(owner.pid).children()  # it has started one of its own
        owner.kill()
    assert_gone(theirs)
    with start(spec, tmp_path) as engine:
        assert processes(engine.pid)[0].parent() != nursery


@pytest.mark.parametrize("victim", ["API server", "EngineCore", "worker"])
def test_an_engine_that_loses_a_process_goes_as_a_whole(spec, tmp_path, victim):
    with start(spec, tmp_path) as engine:
        found = processes(engine.pid)
        server = psutil.Process(engine.pid)
        core = max(server.children(), key=lambda child: child.memory_info().rss)
        worker = max(core.children(), key=lambda child: child.memory_info().rss)
        {"API server": server, "EngineCore": core, "worker": worker}[victim].send_signal(signal.SIGKILL)
        assert_gone(found)
        assert engine.wait() == (-signal.SIGKILL if victim == "API server" else 0)
        assert not engine.alive()


def test_an_executed_engine_lives_and_dies_like_a_forked_one(spec, tmp_path):
    """The way of GPUs, which cannot fork a process that has touched CUDA."""
    with start(spec, tmp_path, fork=False) as engine:
        found = processes(engine.pid)
        key = engine.key
    assert_gone(found)
    assert key not in engine.log.read_text()


def test_a_start_that_takes_too_long_is_given_up(tiny_llama, tmp_path):
    config = EngineConfig(cpu_threads=1, kv_cache_gib=0.25, start_timeout_s=0.01)
    with pytest.raises(EngineError, match="raise engine.start_timeout_s"):
        start(EngineSpec(model=tiny_llama, role=Role.eval, config=config), tmp_path, fork=False)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert Path(tmp_path, next(f for f in os.listdir(tmp_path) if f.startswith("eval-"))).exists()
