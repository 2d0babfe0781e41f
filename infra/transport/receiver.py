"""The engine's side of every transport, in vLLM's weight-transfer API.

An update is prepared beside the running model, in a thread: bytes are fetched, matrices packed, and everything that was
made is read back and compared with the trainer's checksums. Only then does `finish_weight_update` put it in place: on
CPU by exchanging references, so that an engine has all of the old weights or all of the new ones.
"""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from infra.transport import packed
from infra.transport.announced import check_arrived, check_params
from infra.transport.base import ParamMeta, Published, SyncError
from infra.transport.checksum import checksum
from infra.transport.layout import Destination, destinations

Fetch = Callable[[ParamMeta], torch.Tensor]
"""A published parameter's values, on the host or the engine's device, valid while the transport's context is open."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A sender introduces itself (fields as in `Published`)."""

    sender: str
    sender_epoch: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to take: the fields of `Published`."""

    published: dict[str, Any]


@dataclass
class _Staged:
    """What will take a destination's place: new values of its parameter, a new kernel, or both."""

    destination: Destination
    values: torch.Tensor | None = None
    kernel: packed.Kernel | None = None
    checksums: dict[str, str] = field(default_factory=dict)


class _Update:
    """One update on its way."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.metas = {meta.name: meta for meta in published.params}
        self.state = "staging"
        self.error = ""
        self.cancelled = False
        self.staged: list[_Staged] = []
        self.seconds = {"transfer_s": 0.0, "finalize_s": 0.0, "verify_s": 0.0}
        self.thread: threading.Thread | None = None

    def timed(self, name: str, started: float) -> float:
        now = time.monotonic()
        self.seconds[name] += now - started
        return now


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Base of the engine sides: a subclass says only how published bytes are reached."""

    transport: str
    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sender, self.sender_epoch = "", 0
        self.version: int | None = None
        self._update: _Update | None = None
        self._checked: dict[int, tuple[packed.Kernel, dict[str, str]]] = {}
        self._spare: dict[tuple[int, str], torch.Tensor] = {}

    @abstractmethod
    def open(self, published: Published) -> AbstractContextManager[Fetch]:
        """Reach the published bytes. Leaving the context raises if they changed meanwhile."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Follow a sender from now on, whatever its versions.

        Raises SyncError when a newer sender is followed already.
        """
        if init_info.sender_epoch < self.sender_epoch:
            raise SyncError("a newer trainer has taken over this engine: stop the older one")
        if self.parallel_config.world_size > 1:
            raise SyncError(
                f"the engine is spread over {self.parallel_config.world_size} workers: the {self.transport} transport "
                f"reaches engines of one; set engine.tensor_parallel=1"
            )
        if self.device.type == "cpu" and not self.model_config.enforce_eager:
            raise SyncError(
                "a compiled model on CPU holds its packed matrices in the compiled code, where an update cannot reach "
                "them: start rollout engines with engine.eager=true"
            )
        if init_info.sender != self.sender:
            self.version = None
        self.sender, self.sender_epoch = init_info.sender, init_info.sender_epoch

    def start_weight_update(self) -> None:
        if self._update and self._update.state == "staging":
            raise SyncError(f"version {self._update.published.version} is still being prepared")
        self._update = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check what was announced against the model, then prepare it in a thread.

        Raises SyncError when the version is not newer, or names, shapes or types do not fit.
        """
        update = _Update(Published.model_validate(update_info.published))
        plan = destinations(self.model)
        self._check_order(update.published)
        check_params(update.metas, plan)
        self._update = update
        update.thread = threading.Thread(target=self._prepare, args=(update, plan), daemon=True)
        update.thread.start()

    def finish_weight_update(self) -> None:
        """Put what was prepared in place.

        Raises SyncError unless the preparation succeeded.
        """
        update = self._update
        if update is None or update.state != "ready":
            raise SyncError(f"no update is ready: {update.error or update.state if update else 'none was announced'}")
        for staged in update.staged:
            self._put_in_place(staged)
        self._checked = {id(s.destination.module): (s.kernel, s.checksums) for s in update.staged if s.kernel}
        self.version = update.published.version
        update.state, update.staged = "finished", []

    def abandon(self) -> None:
        """Forget the update on its way, whatever its state; the model stays as it is. Waits for its thread."""
        update, self._update = self._update, None
        if update:
            update.cancelled = True
            update.thread.join()

    def status(self) -> dict[str, Any]:
        """Who is followed, the version in place, and the update on its way with its seconds so far."""
        update = self._update
        status = {"sender": self.sender, "version": self.version, "state": "idle", "error": ""}
        if update:
            status |= {"state": update.state, "error": update.error} | update.seconds
        return status

    def checksums(self) -> dict[str, dict[str, str]]:
        """What the model computes with now: name to `checksum`, and to `source` where the parameter is tied to another.

        Packed matrices are read through their layer; a kernel that was read once is not read again, since it cannot
        change, but one that took its place behind our back is.
        """
        found = {}
        for destination in destinations(self.model):
            for name, digest in self._read(destination).items():
                found[name] = {"checksum": digest} | ({"source": destination.source} if destination.source else {})
        return found

    def shutdown(self) -> None:
        self.abandon()

    # Preparation, in the update's thread

    @torch.no_grad()
    def _prepare(self, update: _Update, plan: list[Destination]) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            with self.open(update.published) as fetch:
                values: dict[int, torch.Tensor] = {}
                for destination in plan:
                    if update.cancelled:
                        return
                    staged = self._stage(update, destination, fetch, values)
                    check_arrived(staged.checksums, update.metas, destination.source)
                    update.staged.append(staged)
            update.state = "ready"
        except Exception as error:  # told to the trainer, which decides
            update.staged = []
            update.error = str(error) if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
            update.state = "failed"

    def _stage(
        self, update: _Update, destination: Destination, fetch: Fetch, values: dict[int, torch.Tensor]
    ) -> _Staged:
        """values: new values of parameters staged so far, by id, for what is tied to them."""
        started = time.monotonic()
        staged = _Staged(destination)
        parameter = destination.parameter
        if id(parameter) not in values:
            values[id(parameter)] = self._assemble(update, destination, fetch)
            if parameter.numel():
                staged.values = values[id(parameter)]
        matrix = values[id(parameter)]
        started = update.timed("transfer_s", started)
        if destination.kernel:
            staged.kernel = packed.pack(matrix)
            if not parameter.numel() and not packed.is_packed(staged.kernel):
                raise SyncError(
                    f"vLLM did not pack {destination.pieces[0].name}, though it did when the model was loaded"
                )
            started = update.timed("finalize_s", started)
            staged.checksums = packed.read_back(
                staged.kernel, matrix, destination.shape, destination.dtype, destination.pieces
            )
        else:
            staged.checksums = _checksums(matrix, destination)
        if not parameter.numel():
            del values[id(parameter)]
        update.timed("verify_s", started)
        return staged

    def _assemble(self, update: _Update, destination: Destination, fetch: Fetch) -> torch.Tensor:
        """The destination's values, joined and padded, in memory of the engine's own."""
        parameter = destination.parameter
        if parameter.numel():
            spare = self._spare.pop((id(destination.module), destination.attribute), None)
            values = spare if spare is not None else torch.zeros_like(parameter.data)
        else:
            values = self._scratch(destination)
        for piece in destination.pieces:
            meta = update.metas[piece.name]
            values[piece.start : piece.stop].copy_(fetch(meta))
        return values

    def _scratch(self, destination: Destination) -> torch.Tensor:
        """Memory for one matrix until it is packed, kept: fresh memory costs more than the copy."""
        size = destination.shape[0] * destination.shape[1]
        key = (0, str(destination.dtype))
        if key not in self._spare or self._spare[key].numel() < size:
            self._spare[key] = torch.empty(size, dtype=destination.dtype)
        return self._spare[key][:size].view(destination.shape)

    # The model

    def _put_in_place(self, staged: _Staged) -> None:
        destination, parameter = staged.destination, staged.destination.parameter
        if staged.values is not None:
            if parameter.device.type == "cpu":
                self._spare[id(destination.module), destination.attribute] = parameter.data
                parameter.data = staged.values
            else:
                parameter.data.copy_(staged.values)  # graphs hold its address
        if staged.kernel is not None:
            destination.module.cpu_linear = staged.kernel

    def _read(self, destination: Destination) -> dict[str, str]:
        if not destination.kernel:
            return _checksums(destination.parameter.data, destination)
        kernel = destination.module.cpu_linear
        known, checksums = self._checked.get(id(destination.module), (None, {}))
        if kernel is known and packed.is_packed(kernel):
            return checksums
        checksums = packed.read_back(
            kernel, destination.parameter, destination.shape, destination.dtype, destination.pieces
        )
        self._checked[id(destination.module)] = (kernel, checksums)
        return checksums

    def _check_order(self, published: Published) -> None:
        if published.transport != self.transport:
            raise SyncError(
                f"the engine receives over {self.transport}, the weights were published over {published.transport}"
            )
        if published.sender != self.sender:
            raise SyncError(
                "the weights come from a trainer that has not introduced itself, or that another has replaced"
            )
        if self.version is not None and published.version <= self.version:
            how = "has arrived before" if published.version == self.version else "is older than what the engine serves"
            raise SyncError(f"version {published.version} {how} (version {self.version})")


def _checksums(values: torch.Tensor, destination: Destination) -> dict[str, str]:
    return {
        piece.name: checksum(values[piece.start : piece.stop].to(destination.dtype)) for piece in destination.pieces
    }
