"""Where engines and trainer run: on the same devices in turn, or on devices of their own."""

import math
from dataclasses import dataclass
from typing import Literal

from infra.cluster.phases import Phases
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


@dataclass(frozen=True)
class Work:
    """What `auto` knows of the run.

    asynchronous: engines may sample ahead of the trainer (rl.max_staleness > 0).
    phases: measured earlier, if ever.
    one_gpu: engines read the weights in the trainer's memory (rl.transport=ipc).
    own_gpus: trainer and engines broadcast to each other, each from a GPU of its own (rl.transport=nccl).
    """

    asynchronous: bool = False
    phases: Phases | None = None
    one_gpu: bool = False
    own_gpus: bool = False


NOTHING_KNOWN = Work()
_PARTS = 10_000  # that Ray divides a GPU into
_WORTH = 1.1
"""Separate pools are chosen when they make a step so many times as fast: less is lost again to idle devices."""


def place(cluster: ClusterConfig, engine: EngineConfig, have: Resources, work: Work = NOTHING_KNOWN) -> Placement:
    """Choose for `have` devices.

    Colocated workers take turns: on CPU engines reserve nothing beside the trainer, a GPU is shared.
    `auto` chooses by the phases of an earlier run: in turn a step takes the sum of both, apart and asynchronous the
    longer one. Not measured yet, it separates them on GPUs when there are enough, and colocates them on CPU, since idle
    cores help whoever works.
    Raises PlacementError when they do not fit.
    """
    return _on_gpus(cluster, engine, have, work) if have.gpus else _on_cpus(cluster, engine, have, work)


def of_replica(engine: EngineConfig, replicas: int, have: Resources) -> Resources:
    """What each of the `replicas` engines of a release reserves, so that as many of the next one can start beside them:
    whole GPUs where there are twice as many, else equal parts of those there are; nothing on CPU."""
    if not have.gpus:
        return Resources()
    wanted = 2 * replicas * engine.tensor_parallel
    if wanted <= have.gpus or engine.tensor_parallel > 1:
        return Resources(0, engine.tensor_parallel)
    return Resources(0, math.floor(_PARTS / math.ceil(wanted / have.gpus)) / _PARTS)


def _apart(work: Work) -> tuple[bool, str] | None:
    """Whether separate pools pay, and why; nothing where it was not measured."""
    if work.phases is None:
        return None
    rollout, trainer = work.phases.rollout_s, work.phases.trainer_s
    told = f"measured in {work.phases.run}: rollouts {rollout:.1f} s, training {trainer:.1f} s"
    if not work.asynchronous:
        return False, f"{told}; they wait for each other while rl.max_staleness=0, so that separate pools would idle"
    gain = (rollout + trainer) / max(rollout, trainer)
    idle = 1 - min(rollout, trainer) / max(rollout, trainer)
    verdict = f"{told}; separate pools make a step {gain:.2f} times as fast, one of them idle for {idle:.0%} of it"
    return gain >= _WORTH, verdict


def _on_cpus(cluster: ClusterConfig, engine: EngineConfig, have: Resources, work: Work) -> Placement:
    threads = min(cluster.trainer_threads, max(1, int(have.cpus)))
    need = cluster.engines * engine.cpu_threads + cluster.trainer_ranks * cluster.trainer_threads
    chosen = _apart(work) if cluster.placement == "auto" else None
    if cluster.placement == "disaggregated" or (chosen and chosen[0] and need <= have.cpus):
        if need > have.cpus:
            raise PlacementError(
                f"disaggregated placement needs {need} CPUs ({cluster.engines} engines of {engine.cpu_threads} "
                f"threads, {cluster.trainer_ranks} ranks of {cluster.trainer_threads}), the cluster has {have.cpus:g}; "
                f"set cluster.placement=colocated, or lower engine.cpu_threads and cluster.trainer_threads"
            )
        reason = f"{chosen[1] if chosen else 'asked for'}: {need} of {have.cpus:g} CPUs"
        return Placement("disaggregated", reason, Resources(engine.cpu_threads), Resources(threads), threads)
    if cluster.trainer_ranks * threads > have.cpus:
        raise PlacementError(
            f"{cluster.trainer_ranks} trainer ranks of {threads} threads need {cluster.trainer_ranks * threads} CPUs, "
            f"the cluster has {have.cpus:g}: lower cluster.trainer_ranks or cluster.trainer_threads"
        )
    reason = "asked for" if cluster.placement == "colocated" else "CPU: engines and trainer work in turn on all cores"
    if chosen:
        reason = f"{chosen[1]}; {need} CPUs, {have.cpus:g} are here" if chosen[0] else chosen[1]
    return Placement("colocated", reason, Resources(), Resources(threads), threads)


def _on_gpus(cluster: ClusterConfig, engine: EngineConfig, have: Resources, work: Work) -> Placement:
    apart = cluster.engines * engine.tensor_parallel + cluster.trainer_ranks
    together = max(cluster.engines * engine.tensor_parallel, cluster.trainer_ranks)
    threads = cluster.trainer_threads
    chosen = _apart(work) if cluster.placement == "auto" else None
    wanted = (chosen[0] if chosen else cluster.placement == "auto") and not work.one_gpu
    must = cluster.placement == "disaggregated" or (cluster.placement == "auto" and work.own_gpus)
    if must or (wanted and apart <= have.gpus):
        if apart > have.gpus:
            cure = "set rl.transport=ipc or shm" if work.own_gpus else "set placement=colocated"
            raise PlacementError(
                f"disaggregated placement needs {apart} GPUs ({cluster.engines} engines of {engine.tensor_parallel} "
                f"and {cluster.trainer_ranks} trainer ranks), the cluster has {have.gpus:g}: {cure}"
            )
        reason = f"{chosen[1]}; " if chosen else ""
        reason += "weights are broadcast between GPUs (rl.transport=nccl); " if chosen and not chosen[0] else ""
        reason += f"{apart} of {have.gpus:g} GPUs"
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
    if chosen and not chosen[0]:
        reason = chosen[1]
    if work.one_gpu and cluster.placement == "auto":
        reason = "engines read the weights on the trainer's own GPU (rl.transport=ipc)"
    # NCCL wants each rank on a GPU of its own: two do not fit on one, a rank and an engine do
    return Placement("colocated", reason, Resources(0, 0.49), Resources(0, 0.51), threads)
