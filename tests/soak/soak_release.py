"""Thousands of requests through releases, rollbacks and kills: `pytest -s tests/soak/soak_release.py`.

Not collected by itself. Each part of a round lasts REQUESTS requests at least.
"""

import os
import random
import signal
import time

import psutil
import pytest
from served import api_server, model, release, serving, settings
from traffic import Load

from tasks.release import takeover
from tasks.release.triple import Serving

REQUESTS = 300
ROUNDS = 4
SEED = 0


@pytest.mark.timeout(3600)
def test_thousands_of_requests_through_releases_rollbacks_and_kills(tmp_path, tiny_llama):
    config, choice = settings(tiny_llama, port=18441, hold_s=1.0), random.Random(SEED)
    with serving(tmp_path / "home", config) as (lineage, fleet):
        version = model(tiny_llama, tmp_path / "0", lineage, None)
        release(version, config)
        started = time.monotonic()
        print(f"\n{'after':<24}{'requests':>10}{'failed':>8}{'streams cut':>13}")
        with Load(fleet.address, "served", concurrency=8) as load:
            for round_ in range(ROUNDS):
                load.wait_for(REQUESTS)
                version = model(tiny_llama, tmp_path / f"{round_ + 1}", lineage, version)
                release(version, config)
                tell("a release", load)
                load.wait_for(REQUESTS)
                if round_ % 2:
                    takeover.go_back("served", Serving.of(config), print)
                    tell("a rollback", load)
                load.wait_for(choice.randrange(REQUESTS))
                os.kill(api_server(fleet).pid, signal.SIGKILL)
                for state in fleet.states():
                    pool = state.pools[state.stable]
                    if pool.ready == config.release.fleet.replicas and pool.restarts:
                        break
                tell("a replica's kill", load)
            load.wait_for(REQUESTS)
        host = next(p for p in psutil.Process(state.pid).children(recursive=True) if "EngineHost" in p.name())
        host.kill()  # and with it every engine
        for state in fleet.states():
            pool = state.pools[state.stable]
            if pool.restarts >= 3 and pool.ready == config.release.fleet.replicas:
                break
        with Load(fleet.address, "served", concurrency=8) as after:
            after.wait_for(REQUESTS)
        tell("the kill of all at once", load, after)
    print(f"{ROUNDS} releases, {ROUNDS // 2} rollbacks in {time.monotonic() - started:.0f} s")
    assert load.failed == after.failed == []
    assert state.failed == 0


def tell(after: str, *loads: Load) -> None:
    """A line of figures, counted from the start."""
    total, failed, cut = (sum(part) for part in zip(*((i.total, len(i.failed), i.cut) for i in loads), strict=True))
    print(f"{after:<24}{total:>10}{failed:>8}{cut:>13}", flush=True)
