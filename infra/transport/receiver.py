"""The engine's side of every transport, in vLLM's weight-transfer API.

An update is prepared beside the running model, in a thread: bytes are fetched and compared with the trainer's
checksums, matrices packed and tried against them. Only then does `finish_weight_update` put it in place, so that an
engine has all of the old weights or all of the new ones.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from infra.transport import packed
from infra.transport.announced import check_arrived, check_params
from infra.transport.base import Fetch, Published, Source, SyncError
from infra.transport.checksum import Margins, digests, margins_of
from infra.transport.layout import Destination, destinations
from infra.transport.place import put_in_place
from infra.transport.transports import make_source
from infra.transport.update import InitInfo, Staged, Update, UpdateInfo


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes versions of the target's weights, and of its drafter's, over whatever transport each was published."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = True
    defers_processing = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.followed: dict[str, InitInfo] = {}
        """Whose versions are taken, by model: target or drafter."""
        self.versions: dict[str, int] = {}
        """Version in place, by model."""
        self._sources: dict[str, Source] = {}
        self._update: Update | None = None
        self._checked: dict[int, tuple[packed.Kernel, dict[str, str]]] = {}
        self._spare: dict[tuple[int, str], torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Follow a sender from now on, whatever its versions.

        Raises SyncError when a newer sender is followed already.
        """
        followed = self.followed.get(init_info.model)
        if followed and init_info.sender_epoch < followed.sender_epoch:
            raise SyncError("a newer trainer has taken over this engine: stop the older one")
        if self.parallel_config.world_size > 1:
            raise SyncError(
                f"the engine is spread over {self.parallel_config.world_size} workers: weight updates reach engines of "
                f"one; set engine.tensor_parallel=1"
            )
        if self.device.type == "cpu" and not self.model_config.enforce_eager:
            raise SyncError(
                "a compiled model on CPU holds its packed matrices in the compiled code, where an update cannot reach "
                "them: start rollout engines with engine.eager=true"
            )
        if not followed or init_info.sender != followed.sender:
            self.versions.pop(init_info.model, None)
            for source in self._sources.values():
                source.forget()
        self.followed[init_info.model] = init_info

    def start_weight_update(self) -> None:
        if self._update and self._update.state == "staging":
            raise SyncError(f"version {self._update.published.version} is still being prepared")
        self._update = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check what was announced against the model, then prepare it in a thread.

        Raises SyncError when the version is not newer, or names, shapes or types do not fit.
        """
        update = Update(Published.model_validate(update_info.published), self._name())
        plan = self._destinations(self.model)
        self._check_order(update.published)
        check_params(update.metas, plan)
        self._update = update
        so_far = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        update.thread = threading.Thread(target=self._prepare, args=(update, plan, so_far), daemon=True)
        update.thread.start()

    def finish_weight_update(self) -> None:
        """Put what was prepared in place.

        Raises SyncError unless the preparation succeeded; the old weights are in place then.
        """
        update = self._update
        if update is None or update.state != "ready":
            raise SyncError(f"no update is ready: {update.error or update.state if update else 'none was announced'}")
        put_in_place(update.staged, self._spare)
        self._checked |= {id(s.destination.module): (s.kernel, s.checksums) for s in update.staged if s.kernel}
        self.versions[update.model] = update.published.version
        update.state, update.staged = "finished", []

    def abandon(self) -> None:
        """Forget the update on its way, whatever its state; the model stays as it is. Waits for its thread."""
        update, self._update = self._update, None
        if update:
            update.cancelled = True
            if update.state == "staging":
                self._source(update.published.transport).forget()  # so that it waits for nobody
            update.thread.join()

    def status(self) -> dict[str, Any]:
        """Who is followed and the version in place, by model, and the update on its way with its seconds so far."""
        update = self._update
        senders = {model: info.sender for model, info in self.followed.items()}
        status = {"senders": senders, "versions": self.versions, "state": "idle", "error": ""}
        if update:
            status |= {"state": update.state, "error": update.error} | update.seconds
        return status

    def checksums(self, model: torch.nn.Module) -> dict[str, dict[str, str]]:
        """What `model`, target or drafter, computes with now: name to `checksum`, and to `source` where it is tied.

        Packed matrices are read through their layer; a kernel that was read once is not read again, since it cannot
        change, but one that took its place behind our back is.
        """
        found: dict[str, dict[str, str]] = {}
        margins: dict[str, Margins] = {}
        for destination in self._destinations(model):
            tied = {"source": destination.source} if destination.source else {}
            if destination.kernel:
                found |= {name: {"checksum": digest} | tied for name, digest in self._read(destination).items()}
            else:
                margins |= (read := _margins(destination.parameter.data, destination))
                found |= {name: dict(tied) for name in read}
        for name, digest in zip(margins, digests(list(margins.values())), strict=True):
            found[name]["checksum"] = digest
        return found

    def rest(self) -> None:
        """Give back the memory that is kept for the next update."""
        self._spare.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        self.abandon()

    # Preparation, in the update's thread

    @torch.no_grad()
    def _prepare(self, update: Update, plan: list[Destination], so_far: "torch.cuda.Event | None") -> None:
        """so_far: what the model's stream was asked for before."""
        try:
            started = time.monotonic()
            source = self._source(update.published.transport)
            with self._beside(so_far), source.open(update.published) as fetch:
                update.timed("transfer_s", started)
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

    @contextmanager
    def _beside(self, so_far: "torch.cuda.Event | None") -> Iterator[None]:
        """A stream for the thread's work on a GPU. On the model's own, whoever waits for one of many small copies and
        sums would wait for the steps that the model was asked for before it too."""
        if so_far is None:
            yield
            return
        torch.cuda.set_device(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)  # kept, and with it the memory that torch caches
        self._stream.wait_event(so_far)
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def _stage(self, update: Update, destination: Destination, fetch: Fetch, values: dict[int, torch.Tensor]) -> Staged:
        """values: new values of parameters staged so far, by id, for what is tied to them."""
        started = time.monotonic()
        staged = Staged(destination)
        parameter = destination.parameter
        if id(parameter) not in values:
            values[id(parameter)] = self._assemble(update, destination, fetch)
            if parameter.numel():
                staged.values = values[id(parameter)]
        matrix = values[id(parameter)]
        if matrix.device.type == "cuda":
            torch.cuda.current_stream(matrix.device).synchronize()  # what is timed is the copy, not asking for it
        lands = self._source(update.published.transport).lands
        started = update.timed("finalize_s" if lands else "transfer_s", started)
        if destination.kernel:
            staged.kernel = packed.pack(matrix)
            if not parameter.numel() and not packed.is_packed(staged.kernel):
                raise SyncError(
                    f"vLLM did not pack {destination.pieces[0].name}, though it did when the model was loaded"
                )
            started = update.timed("finalize_s", started)
            packed.check_packing(staged.kernel, matrix, destination.pieces[0].name, update.published.version)
        staged.checksums = _checksums(matrix, destination)
        if not parameter.numel():
            del values[id(parameter)]
        update.timed("verify_s", started)
        return staged

    def _assemble(self, update: Update, destination: Destination, fetch: Fetch) -> torch.Tensor:
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

    def _destinations(self, model: torch.nn.Module) -> list[Destination]:
        return destinations(model, None if model is self._default_model else self._default_model)

    def _read(self, destination: Destination) -> dict[str, str]:
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
        followed, version = self.followed.get(self._name()), self.versions.get(self._name())
        if not followed or published.sender != followed.sender:
            raise SyncError(
                "the weights come from a trainer that has not introduced itself, or that another has replaced"
            )
        if version is not None and published.version <= version:
            how = "has arrived before" if published.version == version else "is older than what the engine serves"
            raise SyncError(f"version {published.version} {how} (version {version})")

    def _name(self) -> str:
        return "target" if self.model is self._default_model else "drafter"

    def _source(self, transport: str) -> Source:
        if transport not in self._sources:
            self._sources[transport] = make_source(transport, self.device)
        return self._sources[transport]


def _checksums(values: torch.Tensor, destination: Destination) -> dict[str, str]:
    margins = _margins(values, destination)
    return dict(zip(margins, digests(list(margins.values())), strict=True))


def _margins(values: torch.Tensor, destination: Destination) -> dict[str, Margins]:
    return {
        piece.name: margins_of(values[piece.start : piece.stop].to(destination.dtype)) for piece in destination.pieces
    }
