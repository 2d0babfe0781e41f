"""Pools of GPUs, and the global concurrency limits in Prefect that let one run at a time have each."""

from typing import Literal

from infra.services import environment

environment.apply()

from prefect.client.orchestration import SyncPrefectClient  # noqa: E402  (Prefect reads its settings on import)
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate  # noqa: E402
from prefect.exceptions import ObjectNotFound  # noqa: E402

Pool = Literal["engines", "trainer"]

SHARED = "lockstep-gpu"


def tags(*pools: Pool) -> set[str]:
    """Tags of a task that works on these pools: Prefect holds it back while another task has the last slot of a tag."""
    return {SHARED, *(f"lockstep-{pool}" for pool in pools)} if pools else set()


def limits(gpus: int) -> dict[str, int]:
    """Slots by tag on a machine with so many GPUs. One GPU is one pool, shared in turns by engines and trainer; several
    are two, since a run may train while another one samples. Without GPUs nothing is held back."""
    if gpus == 0:
        return {}
    return {SHARED: 1} if gpus == 1 else {"lockstep-engines": 1, "lockstep-trainer": 1}


def guard(client: SyncPrefectClient, gpus: int) -> None:
    """Make the limits that are missing; those that are there stay as somebody set them."""
    for tag, slots in limits(gpus).items():
        try:
            client.read_global_concurrency_limit_by_name(f"tag:{tag}")
        except ObjectNotFound:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=f"tag:{tag}", limit=slots))
