import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

CODE = """
import os, sys, time
from pathlib import Path
from infra.cluster.session import session
from infra.config.target import EngineConfig
from infra.engine.spec import EngineSpec, Role

class Worker:
    def pid(self):
        return os.getpid()

s = session()
worker = s.actor(Worker)
with s.engine(EngineSpec(model=Path(sys.argv[1]), role=Role.eval, config=EngineConfig(cpu_threads=1))) as handle:
    print("ready", s.result(worker.pid.remote()), flush=True)
    time.sleep(600)
"""
LEFT_TO_RAY = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own helpers: they end by themselves once they have given up on reaching their server, after a minute."""


def running(processes):
    return [p for p in processes if command(p)]


def command(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline()) if process.is_running() else ""
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def test_engines_and_workers_end_with_a_killed_driver(tiny_llama):
    driving = [sys.executable, "-c", CODE, str(tiny_llama)]
    with subprocess.Popen(driving, stdout=subprocess.PIPE, text=True) as driver:
        try:
            worker = int(driver.stdout.readline().removeprefix("ready "))
            family = psutil.Process(driver.pid).children(recursive=True)
            named = {p: command(p) for p in family}
        finally:
            os.kill(driver.pid, signal.SIGKILL)
    assert worker in {p.pid for p in family}
    assert len([name for name in named.values() if "infra.engine.nursery" in name]) > 3  # forked: all have its command
    mine = [p for p in family if not named[p].startswith(LEFT_TO_RAY)]
    _, left = psutil.wait_procs(mine, timeout=600)
    assert not running(left), [named[p] for p in running(left)]
    for helper in running(family):
        with suppress(psutil.NoSuchProcess):
            helper.kill()
