"""The cost of a loop, from the seconds of its phases and the devices that its configuration gives them."""

import pytest

from infra.config.flows import LoopConfig
from infra.config.target import ClusterConfig, EngineConfig
from tasks.report.glance import device_seconds

PHASES = {
    "rl": {"seconds": 200.0, "spans": {"engine_start": 10.0, "engine": 50.0, "trainer": 40.0, "sync": 5.0}},
    "quantize": {"seconds": 60.0, "spans": {"engine": 20.0, "quantize": 10.0}},
}


@pytest.mark.parametrize(
    ("accelerated", "expected"),
    [
        (True, (10 + 50) * 2 * 4 + (40 + 5) * 3 + 20 * 4 + 10),  # two engines of four GPUs, three ranks of one
        (False, (10 + 50) * 2 * 6 + (40 + 5) * 3 * 5 + 20 * 6 + 10 * 5),  # six threads an engine, five a rank
    ],
)
def test_devices_are_counted_for_as_long_as_they_are_held(accelerated, expected):
    config = LoopConfig(
        engine=EngineConfig(tensor_parallel=4, cpu_threads=6),
        cluster=ClusterConfig(engines=2, trainer_ranks=3, trainer_threads=5),
    ).model_dump(mode="json")
    assert device_seconds(config, PHASES, accelerated=accelerated) == expected
