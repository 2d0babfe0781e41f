"""What `lockstep measure sleep` tells of sleeps of an engine."""

import pytest

from infra.config.flows import FlowConfig
from infra.engine.pin import accelerated
from tasks.evaluate.measurement import MeasureError
from tasks.measure.sleep import MEASUREMENT, SleepOptions, _finding, _line, _rows


def slept(seconds: float, gib: float) -> dict[str, float]:
    """A sleep, with as many seconds in each phase."""
    phases = dict.fromkeys(("asleep_s", "wake_weights_s", "update_s", "wake_cache_s"), seconds)
    return phases | {"awake_s": 3 * seconds, "given_back_gib": gib, "left_gib": gib + 50}


def test_each_level_is_one_line_of_medians_and_rows_of_evidence():
    found = {1: [slept(s, 40) for s in (0.1, 0.3, 0.2)], 2: [slept(0.05, 42)]}
    first, second = (_line("random-8b", 16 * 2**30, level, figures) for level, figures in found.items())
    assert first["level"] == 1 and first["sleep, s"] == 0.2 and first["awake again, s"] == pytest.approx(0.6)
    assert second["given back, GiB"] == 42 and second["free then, GiB"] == 92
    assert _finding(first).startswith("At level 1 random-8b (16 GiB of weights) gave back 40 GiB in 0.20 s")
    rows = {(row["figure"], row["domain"]): row for row in _rows("random-8b", found)}
    assert rows["sleep_asleep_s", "level 1/random-8b"]["high"] == 0.3 and len(rows) == 12
    assert rows["sleep_given_back_gib", "level 2/random-8b"]["unit"] == "GiB"


@pytest.mark.skipif(accelerated(), reason="engines run on GPUs here")
def test_an_engine_on_cpu_is_not_measured():
    with pytest.raises(MeasureError, match="an engine on CPU frees nothing when it sleeps"):
        MEASUREMENT.measure(FlowConfig(), SleepOptions(), print)
