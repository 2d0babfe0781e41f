"""Whether engines can reach the weights as they are asked to."""

from infra.config.flows import LoopConfig, RLFlowConfig


def out_of_reach(config: RLFlowConfig | LoopConfig) -> str:
    """Why weights would not get from the trainer's GPU to the engines', in one line; empty when they will."""
    cluster = config.cluster
    if config.rl.transport == "nccl" and cluster.placement == "colocated":
        return (
            "rl.transport=nccl needs trainer and engines on GPUs of their own, cluster.placement=colocated shares "
            "them: set rl.transport=ipc or shm, or cluster.placement=disaggregated"
        )
    several = {
        "cluster.engines": cluster.engines,
        "cluster.trainer_ranks": cluster.trainer_ranks,
        "engine.tensor_parallel": config.engine.tensor_parallel,
    }
    apart = [f"{name}={count}" for name, count in several.items() if count > 1]
    if cluster.placement == "disaggregated":
        apart.insert(0, "cluster.placement=disaggregated")
    if config.rl.transport != "ipc" or not apart:
        return ""
    return (
        f"rl.transport=ipc needs trainer and engine on one GPU, {' and '.join(apart)} puts them on several: set "
        f"rl.transport=nccl, or shm on one host"
    )
