import pytest

from tasks.measure.fabric import Fleet, Rate, fit, plan


def test_a_line_through_measured_sizes_has_a_fixed_part_and_a_rate():
    found = fit([(1.0, 0.7), (2.0, 1.2), (4.0, 2.2)])
    assert (found.fixed_s, found.gb_s) == (pytest.approx(0.2), pytest.approx(2.0))
    assert found.seconds(16) == pytest.approx(8.2)


@pytest.mark.parametrize("points", [[(2.0, 1.0)], [(2.0, 1.0), (2.0, 1.0)], [(1.0, 2.0), (3.0, 0.0)]])
def test_without_a_rising_line_the_mean_rate_is_taken(points):
    assert fit(points) == Rate(0.0, pytest.approx(2.0))


def test_a_fleet_is_told_what_it_needs_and_what_it_waits():
    fleet = Fleet(parameters=8, dtype="bfloat16", engines=4, steps_per_hour=60, wait_share=0.05)
    figures, sentence = plan(fleet, "shm", whole=Rate(1.0, 16.0), pause=Rate(0.1, 160.0))
    assert figures["plan_gb"] == 16 and figures["plan_needed_gb_per_s"] == pytest.approx(16 / 3)
    assert figures["plan_update_s"] == pytest.approx(2.0) and figures["plan_gb_per_s"] == pytest.approx(8.0)
    assert figures["plan_share_of_step"] == pytest.approx(2 / 60)
    assert figures["plan_pause_share_of_step"] == pytest.approx(0.2 / 60)
    assert "64 GB for 4" in sentence and "enough" in sentence
    assert "too slow" in plan(fleet, "store", whole=Rate(0.0, 1.0), pause=Rate(0.0, 1.0))[1]
