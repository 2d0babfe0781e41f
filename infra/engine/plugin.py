"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

import os
from functools import cache
from multiprocessing import shared_memory

from infra.engine.flags import PINNED_VARIABLE, SHARED_MEMORY_VARIABLE


@cache
def register() -> None:
    """Apply the engine's quirks, make Lockstep's weight transfer known, and have pinned weights checked, once in a
    process and its forks."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from infra.engine import quirks

    quirks.apply()
    WeightTransferEngineFactory.register_engine("lockstep", "infra.transport.receiver", "Receiver")
    if os.environ.get(PINNED_VARIABLE, "{}") != "{}":
        from infra.transport.loaded import check_when_loaded

        check_when_loaded()
    if prefix := os.environ.get(SHARED_MEMORY_VARIABLE):  # none where Lockstep's guardian is not watching
        shared_memory._SHM_NAME_PREFIX = f"/{prefix}"
        shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 13
