import pytest

from infra.cluster.phases import Phases, measured_phases
from infra.cluster.placement import Placement, PlacementError, Resources, Work, of_replica, place
from infra.config.flows import RLFlowConfig
from infra.config.target import ClusterConfig, EngineConfig
from infra.services import runs

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


@pytest.mark.parametrize(
    ("replicas", "parallel", "gpus", "each"),
    [(1, 1, 0, 0), (1, 1, 1, 0.5), (3, 1, 2, 0.3333), (1, 1, 2, 1), (1, 2, 2, 2), (2, 2, 8, 2)],
)
def test_replicas_leave_room_for_those_of_the_next_release(replicas, parallel, gpus, each):
    got = of_replica(EngineConfig(tensor_parallel=parallel), replicas, Resources(8, gpus))
    assert got == Resources(0, each)


def test_auto_stays_on_the_gpu_whose_memory_engines_read():
    work = Work(True, Phases(run="rl-1", rollout_s=10, trainer_s=10), one_gpu=True)
    for known in (work, Work(one_gpu=True)):
        got = place(ClusterConfig(), EngineConfig(), Resources(8, 2), known)
        assert got.mode == "colocated" and "rl.transport=ipc" in got.reason


def test_auto_gives_those_that_broadcast_gpus_of_their_own():
    short = Work(True, Phases(run="rl-1", rollout_s=12, trainer_s=0.5), own_gpus=True)  # would rather take turns
    got = place(ClusterConfig(), EngineConfig(), Resources(8, 2), short)
    assert got.mode == "disaggregated" and "rl.transport=nccl" in got.reason
    with pytest.raises(PlacementError, match="needs 2 GPUs .* has 1: set rl.transport=ipc or shm"):
        place(ClusterConfig(), EngineConfig(), Resources(8, 1), Work(own_gpus=True))
    assert place(ClusterConfig(), EngineConfig(), TWO_CPUS, Work(own_gpus=True)).mode == "colocated"  # over gloo


@pytest.mark.parametrize(
    ("asynchronous", "rollout_s", "trainer_s", "mode", "words"),
    [
        (True, 12.0, 8.0, "disaggregated", "rollouts 12.0 s, training 8.0 s; separate pools make a step 1.67 times"),
        (True, 12.0, 0.5, "colocated", "1.04 times as fast, one of them idle for 96%"),
        (False, 12.0, 8.0, "colocated", "rl.max_staleness=0, so that separate pools would idle"),
    ],
)
@pytest.mark.parametrize("have", [Resources(cpus=4), Resources(8, 2)])
def test_auto_chooses_by_what_an_earlier_run_took(have, asynchronous, rollout_s, trainer_s, mode, words):
    work = Work(asynchronous, Phases(run="rl-1", rollout_s=rollout_s, trainer_s=trainer_s))
    got = place(ClusterConfig(), EngineConfig(), have, work)
    assert got.mode == mode and words in got.reason and "rl-1" in got.reason


def test_auto_stays_in_turn_where_there_are_too_few_devices_and_a_choice_of_the_users_stands():
    work = Work(True, Phases(run="rl-1", rollout_s=10, trainer_s=10))
    got = place(ClusterConfig(), EngineConfig(), TWO_CPUS, work)
    assert got.mode == "colocated" and "4 CPUs, 2 are here" in got.reason
    assert place(ClusterConfig(placement="colocated"), EngineConfig(), Resources(8, 2), work).reason == "asked for"


def test_phases_are_those_of_the_newest_finished_run_of_the_same_size(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    assert measured_phases("smol", 1, 1) is None

    def finish(spans: dict, **cluster) -> None:
        with runs.claim("rl", RLFlowConfig(cluster=ClusterConfig(**cluster))) as key:
            pass
        runs._write(runs.read(key).model_copy(update={"outcome": {"spans": spans}}))

    finish({"engine": 5.0, "trainer": 3.0})
    finish({"engine": 9.0, "trainer": 1.0}, engines=2)
    found = measured_phases("smol", 1, 1)
    assert (found.rollout_s, found.trainer_s) == (5.0, 3.0)
    assert measured_phases("smol", 2, 1).rollout_s == 9.0 and measured_phases("other", 1, 1) is None
