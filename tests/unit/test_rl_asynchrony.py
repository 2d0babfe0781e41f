"""What `lockstep measure asynchrony` trains, and what it says of it."""

from pathlib import Path

import pandas as pd
import pytest

from infra.config.flows import RLFlowConfig
from infra.config.rl import RLConfig
from infra.config.target import ClusterConfig, EngineConfig
from tasks.evaluate.measurement import MeasureError
from tasks.rl.lengths import Lengths
from tasks.rl.measure_asynchrony import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    AsynchronyOptions,
    Trained,
    _cases,
    _findings,
    _line,
    _rows,
)
from tasks.rl.result import HeldOut, RLResult


def configured(**rl) -> RLFlowConfig:
    return RLFlowConfig(cluster=ClusterConfig(engines=3, trainer_ranks=1), rl=RLConfig(**rl))


def test_both_train_the_same_but_for_staleness_and_share_or_part_the_same_devices():
    config = configured(max_staleness=1, stragglers="carry", steps=3, eval_every=1, checkpoint_every=1)
    cases = _cases(config, AsynchronyOptions(steps=5, colocated=True))
    synchronous, asynchronous = cases[SYNCHRONOUS], cases[ASYNCHRONOUS]
    differs = {"max_staleness", "stragglers"}
    assert synchronous.rl.model_dump(exclude=differs) == asynchronous.rl.model_dump(exclude=differs)
    assert (synchronous.rl.max_staleness, asynchronous.rl.max_staleness, asynchronous.rl.steps) == (0, 2, 5)
    assert (synchronous.rl.stragglers, asynchronous.rl.stragglers) == ("wait", "carry")
    shared, apart = synchronous.cluster, asynchronous.cluster
    assert (shared.placement, shared.engines, shared.trainer_ranks) == ("colocated", 4, 4)
    assert (apart.placement, apart.engines, apart.trainer_ranks) == ("disaggregated", 3, 1)
    assert synchronous.rl.transport == "shm"
    broadcast = _cases(configured(transport="nccl", transport_sharded=True), AsynchronyOptions(colocated=True))
    found = {mode: (case.rl.transport, case.rl.transport_sharded) for mode, case in broadcast.items()}
    assert found == {SYNCHRONOUS: ("shm", False), ASYNCHRONOUS: ("nccl", True)}  # no two members share a GPU
    wide = config.model_copy(update={"engine": EngineConfig(tensor_parallel=2)})
    with pytest.raises(MeasureError, match="cannot share them with a trainer: leave out --colocated"):
        _cases(wide, AsynchronyOptions(colocated=True))


def trained(seconds: float, after: list[float]) -> Trained:
    steps = pd.DataFrame(
        {
            "step": [1, 2],
            "step_s": [seconds, seconds],
            "trainer_idle_share": [0.5, 0.3],
            "engine_idle_share": [0.2, 0.2],
            "staleness_mean": [0.0, 1.0],
            "k3": [0.0, 1e-3],
            "reward_mean": [0.1, 0.2],
        }
    )
    result = RLResult(
        model=Path(),
        tables=Path(),
        held_out=[HeldOut(environment="letters", before=[0.0] * len(after), after=after, dataset_digest="")],
        general_before=[],
        general_after=[],
        general_digest="",
        spans={},
        placement="disaggregated",
        engine="",
        hardware="",
    )
    lengths = Lengths(1200)
    for seed in range(500):
        lengths(seed)
    return Trained(configured(), result, steps, lengths)


def test_steps_an_hour_idle_time_and_reward_are_compared():
    runs = {SYNCHRONOUS: trained(3.0, [1.0] * 8 + [0.0] * 2), ASYNCHRONOUS: trained(1.5, [1.0] * 9 + [0.0])}
    rows = _rows(runs, AsynchronyOptions())
    found = {(row["figure"], row["domain"]): row["value"] for row in rows}
    assert found["asynchrony_speedup", ""] == pytest.approx(2.0)
    assert found["asynchrony_steps_per_hour", ASYNCHRONOUS] == pytest.approx(2400)
    assert found["asynchrony_trainer_idle_share", SYNCHRONOUS] == pytest.approx(0.4)
    assert found["asynchrony_reward_difference", ""] == pytest.approx(0.1)
    assert found["asynchrony_tail", ""] > 8
    speed, idle, reward = _findings(runs, rows, AsynchronyOptions())
    assert "an hour takes 2400 steps, synchronous 1200: 2.00 times as many" in speed
    assert "40% of the synchronous time and 40% of the asynchronous" in idle
    assert "0.800 synchronous and 0.900 asynchronous" in reward and "none that this sample can tell" in reward
    assert _line(SYNCHRONOUS, runs[SYNCHRONOUS]).keys() == _line(ASYNCHRONOUS, runs[ASYNCHRONOUS]).keys()
