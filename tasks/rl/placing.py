"""Where the engines and the trainer of a run work, and what an engine does while the trainer works."""

from infra.cluster.phases import measured_phases
from infra.cluster.placement import Placement, PlacementError, Work, place
from infra.cluster.session import session
from infra.config.flows import RLFlowConfig
from infra.config.reach import out_of_reach
from infra.engine.pin import accelerated
from infra.services.progress import report


def choose_place(config: RLFlowConfig) -> Placement:
    """The placement on the devices there are; says which and why.

    Raises PlacementError when there are too few, or weights would not reach the engines.
    """
    cluster = config.cluster
    if accelerated() and (why := out_of_reach(config)):
        raise PlacementError(why)
    phases = measured_phases(config.target.name, cluster.engines, cluster.trainer_ranks)
    transport = config.rl.transport
    work = Work(config.rl.max_staleness > 0, phases, one_gpu=transport == "ipc", own_gpus=transport == "nccl")
    where = place(cluster, config.engine, session().resources(), work)
    report(f"{where.mode}: {where.reason}")
    return where


def sleep_level(config: RLFlowConfig, mode: str) -> int:
    """`cluster.sleep_level` where engines can sleep while the trainer works, else 0.

    They cannot on CPU, where vLLM frees nothing, beside a trainer with devices of its own, or while they sample ahead.
    """
    if mode == "colocated" and accelerated() and config.rl.max_staleness == 0:
        return config.cluster.sleep_level
    return 0
