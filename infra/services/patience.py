"""Waiting for a service that is being started again."""

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

from infra.services.record import Record

RESTART_S = 300.0  # a keeper has a dead service back long before, but on a machine that is busy with all of them
POLL_S = 0.5

T = TypeVar("T")


def patiently(ask: Callable[[], T]) -> T:
    """What `ask` gives, which asks the Prefect server through a client of its own. Where a keeper looks after it, a
    server that cannot be reached is waited for: Prefect's own client does so only if it has reached it before.

    Raises httpx.ConnectError when nobody looks after it, or it stays away for `RESTART_S`.
    """
    deadline = time.monotonic() + RESTART_S
    while True:
        try:
            return ask()
        except httpx.ConnectError:  # what was asked has not arrived, so it is not asked twice
            if Record.read("keeper") is None or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)
