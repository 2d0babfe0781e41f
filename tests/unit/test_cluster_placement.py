import pytest

from infra.cluster.placement import Placement, PlacementError, Resources, place
from infra.config.target import ClusterConfig, EngineConfig

TWO_CPUS = Resources(cpus=2)


def test_auto_on_cpu_works_in_turn_on_all_cores():
    got = place(ClusterConfig(), EngineConfig(), TWO_CPUS)
    assert got.mode == "colocated" and got.engine == Resources() and got.trainer == Resources(cpus=2)
    assert got.trainer_threads == 2 and "in turn" in got.reason


def test_threads_never_exceed_the_cores():
    assert place(ClusterConfig(trainer_threads=8), EngineConfig(), TWO_CPUS).trainer_threads == 2


def test_disaggregated_on_cpu_reserves_both_sides():
    config, engine = ClusterConfig(placement="disaggregated", trainer_threads=1), EngineConfig(cpu_threads=1)
    got = place(config, engine, TWO_CPUS)
    assert (got.mode, got.engine, got.trainer) == ("disaggregated", Resources(cpus=1), Resources(cpus=1))


@pytest.mark.parametrize(
    ("cluster", "engine", "have", "words"),
    [
        ({"placement": "disaggregated"}, {}, TWO_CPUS, "needs 4 CPUs .* has 2; set cluster.placement=colocated"),
        ({"trainer_ranks": 3}, {}, TWO_CPUS, "3 trainer ranks of 2 threads need 6 CPUs, the cluster has 2"),
        ({"placement": "disaggregated"}, {}, Resources(8, 1), "needs 2 GPUs .* has 1: set placement=colocated"),
        ({"placement": "colocated", "engines": 2}, {}, Resources(8, 1), "needs 2 GPUs .* has 1: lower cluster.engines"),
        ({"placement": "colocated"}, {"tensor_parallel": 2}, Resources(8, 2), "engines of 2 GPUs cannot share them"),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(cluster, engine, have, words):
    with pytest.raises(PlacementError, match=words):
        place(ClusterConfig(**cluster), EngineConfig(**engine), have)


@pytest.mark.parametrize(("gpus", "mode"), [(1, "colocated"), (2, "disaggregated")])
def test_auto_separates_when_there_are_gpus_enough(gpus, mode):
    got = place(ClusterConfig(), EngineConfig(), Resources(8, gpus))
    assert isinstance(got, Placement) and got.mode == mode
    engine, trainer = got.engine.gpus, got.trainer.gpus
    if mode == "disaggregated":
        assert engine == trainer == 1
    else:  # both fit on a GPU, two ranks do not
        assert engine + trainer <= 1 < 2 * trainer
