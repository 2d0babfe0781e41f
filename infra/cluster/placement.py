"""Where engines and trainer run: on the same devices in turn, or on devices of their own."""

from dataclasses import dataclass
from typing import Literal

from infra.config.target import ClusterConfig, EngineConfig


class PlacementError(RuntimeError):
    """Workers that do not fit on the cluster. The message gives what is needed and what there is."""


@dataclass(frozen=True)
class Resources:
    """Devices of a cluster, or what one worker reserves of them. Fractions share a device."""

    cpus: float = 0.0
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs"


@dataclass(frozen=True)
class Placement:
    """What each engine and each trainer rank reserves.

    reason: one line, why this mode.
    trainer_threads: torch threads of a rank on CPU.
    """

    mode: Literal["colocated", "disaggregated"]
    reason: str
    engine: Resources
    trainer: Resources
    trainer_threads: int


def place(cluster: ClusterConfig, engine: EngineConfig, have: Resources) -> Placement:
    """Choose for `have` devices.

    Colocated workers take turns: on CPU engines reserve nothing beside the trainer, a GPU is shared.
    `auto` separates them on GPUs when there are enough, and colocates them otherwise; on CPU it colocates, since idle
    cores help whoever works.
    Raises PlacementError when they do not fit.
    """
    return _on_gpus(cluster, engine, have) if have.gpus else _on_cpus(cluster, engine, have)


def _on_cpus(cluster: ClusterConfig, engine: EngineConfig, have: Resources) -> Placement:
    threads = min(cluster.trainer_threads, max(1, int(have.cpus)))
    need = cluster.engines * engine.cpu_threads + cluster.trainer_ranks * cluster.trainer_threads
    if cluster.placement == "disaggregated":
        if need > have.cpus:
            raise PlacementError(
                f"disaggregated placement needs {need} CPUs ({cluster.engines} engines of {engine.cpu_threads} "
                f"threads, {cluster.trainer_ranks} ranks of {cluster.trainer_threads}), the cluster has {have.cpus:g}; "
                f"set cluster.placement=colocated, or lower engine.cpu_threads and cluster.trainer_threads"
            )
        reason = f"asked for: {need} of {have.cpus:g} CPUs"
        return Placement("disaggregated", reason, Resources(engine.cpu_threads), Resources(threads), threads)
    if cluster.trainer_ranks * threads > have.cpus:
        raise PlacementError(
            f"{cluster.trainer_ranks} trainer ranks of {threads} threads need {cluster.trainer_ranks * threads} CPUs, "
            f"the cluster has {have.cpus:g}: lower cluster.trainer_ranks or cluster.trainer_threads"
        )
    reason = "asked for" if cluster.placement == "colocated" else "CPU: engines and trainer work in turn on all cores"
    return Placement("colocated", reason, Resources(), Resources(threads), threads)


def _on_gpus(cluster: ClusterConfig, engine: EngineConfig, have: Resources) -> Placement:
    apart = cluster.engines * engine.tensor_parallel + cluster.trainer_ranks
    together = max(cluster.engines * engine.tensor_parallel, cluster.trainer_ranks)
    threads = cluster.trainer_threads
    if cluster.placement == "disaggregated" or (cluster.placement == "auto" and apart <= have.gpus):
        if apart > have.gpus:
            raise PlacementError(
                f"disaggregated placement needs {apart} GPUs ({cluster.engines} engines of {engine.tensor_parallel} "
                f"and {cluster.trainer_ranks} trainer ranks), the cluster has {have.gpus:g}: set placement=colocated"
            )
        reason = f"{apart} of {have.gpus:g} GPUs"
        return Placement("disaggregated", reason, Resources(0, engine.tensor_parallel), Resources(0, 1), threads)
    if engine.tensor_parallel > 1:
        raise PlacementError(
            f"engines of {engine.tensor_parallel} GPUs cannot share them with a trainer: set engine.tensor_parallel=1, "
            f"or bring {apart} GPUs for disaggregated placement"
        )
    if together > have.gpus:
        raise PlacementError(
            f"colocated placement needs {together} GPUs ({cluster.engines} engines, {cluster.trainer_ranks} trainer "
            f"ranks), the cluster has {have.gpus:g}: lower cluster.engines or cluster.trainer_ranks"
        )
    reason = "asked for" if cluster.placement == "colocated" else f"{have.gpus:g} GPUs are too few for {apart} workers"
    # NCCL wants each rank on a GPU of its own: two do not fit on one, a rank and an engine do
    return Placement("colocated", reason, Resources(0, 0.49), Resources(0, 0.51), threads)
