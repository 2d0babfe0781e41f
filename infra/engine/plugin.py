"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

from functools import cache


@cache
def register() -> None:
    """Apply the engine's quirks and make Lockstep's weight transports known, once in a process and its forks."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from infra.engine import quirks

    quirks.apply()
    WeightTransferEngineFactory.register_engine("shm", "infra.transport.shm_engine", "ShmWeightTransferEngine")
