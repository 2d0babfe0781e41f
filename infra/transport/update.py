"""One update on its way into an engine: what was announced, what is staged, how far it is."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from infra.transport.base import Published
from infra.transport.layout import Destination
from infra.transport.packed import Kernel


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A sender introduces itself (fields as in `Published`). model: whose weights it sends, target or drafter."""

    sender: str
    sender_epoch: int
    model: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to take: the fields of `Published`."""

    published: dict[str, Any]


@dataclass
class Staged:
    """What will take a destination's place: new values of its parameter, a new kernel, or both."""

    destination: Destination
    values: torch.Tensor | None = None
    kernel: Kernel | None = None
    checksums: dict[str, str] = field(default_factory=dict)


class Update:
    """One update of `model`, target or drafter, on its way. state: staging, ready, finished or failed; seconds: by kind
    of work so far."""

    def __init__(self, published: Published, model: str) -> None:
        self.published, self.model = published, model
        self.metas = {meta.name: meta for meta in published.params}
        self.state = "staging"
        self.error = ""
        self.cancelled = False
        self.staged: list[Staged] = []
        self.seconds = {"transfer_s": 0.0, "finalize_s": 0.0, "verify_s": 0.0}
        self.thread: threading.Thread | None = None

    def timed(self, name: str, started: float) -> float:
        """Add the time since `started` to `seconds[name]`; the time now."""
        now = time.monotonic()
        self.seconds[name] += now - started
        return now
