"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""


def register() -> None:
    """Apply the engine's quirks and make Lockstep's weight transports known."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from infra.engine import quirks

    quirks.apply()
    if "shm" not in WeightTransferEngineFactory._registry:  # a forked process has it already
        WeightTransferEngineFactory.register_engine("shm", "infra.transport.shm_engine", "ShmWeightTransferEngine")
