"""The `ipc` transport: an engine on the trainer's own GPU reads the trainer's memory there, without a copy in between.

CUDA's handle of the memory travels as plain fields, never as a pickle. On CPU the same two classes share host memory.
"""

import base64
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from infra.transport.base import SAME_HOST, Fetch, Published, Reach, SyncError
from infra.transport.flat import fill, lay_out, view
from infra.transport.publisher import Publisher
from infra.transport.shm import ShmSender, ShmSource

_SCHEME = "cuda-ipc:"
# What torch tells about shared CUDA memory, in its order: bytes travel as base64.
_FIELDS = (
    "device",
    "handle",
    "storage_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
_BYTES = {"handle", "event_handle"}
_COUNTER = ("ref_counter_handle", "ref_counter_offset")
_UNCOUNTED = (b"/lockstep-uncounted", 0)
"""A count that is nowhere: torch lets an opener take back one of a single count, and we open memory more often."""


class IpcSender(Publisher):
    """Packs weights into one piece of memory of the device they are on, which is reused from version to version."""

    transport = "ipc"

    def __init__(self, dtype: str | None = None, reach: Reach = SAME_HOST) -> None:
        super().__init__(dtype, reach)
        self._host = ShmSender(dtype, reach)
        self._flat: torch.Tensor | None = None
        self._shared: Shared | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], engines: int = 1) -> Published:
        """Copy `named_tensors` (Hugging Face names, all on one device) and announce them as `version`.

        Raises SyncError when a tensor holds values that are not finite.
        """
        started = time.monotonic()
        tensors, slots, size = lay_out(named_tensors, self.dtype)
        device = next(iter(tensors.values())).device
        if device.type != "cuda":
            found = self._host.publish(version, tensors.items())
            return self._announce(version, found.location, found.params, started)
        if self._flat is None or self._flat.numel() != size or self._flat.device != device:
            self._let_go()
            self._flat = torch.empty(size, dtype=torch.uint8, device=device)
            self._shared = share(self._flat)  # once: each handle adds a reference count to the memory
        params = fill(self._flat, tensors, slots)
        torch.cuda.current_stream(device).synchronize()  # another process reads next
        return self._announce(version, self._shared.location, params, started)

    def close(self) -> None:
        """Free the memory. May be called again."""
        self._let_go()
        self._host.close()

    def _let_go(self) -> None:
        if self._shared:
            self._shared.release()
        self._flat = self._shared = None


class IpcSource:
    """Opens the trainer's memory for the time of an update."""

    lands = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, ShmSource(device)

    @contextmanager
    def open(self, published: Published) -> Iterator[Fetch]:
        if not published.location.startswith(_SCHEME):
            with self._host.open(published) as fetch:
                yield fetch
            return
        try:
            flat = open_shared(published.location, self._device)
        except RuntimeError as error:
            raise SyncError(
                f"the trainer's GPU memory cannot be opened ({error}): did the trainer die, or is it on another GPU? "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments must be off in the trainer"
            ) from error
        yield partial(view, flat)
        torch.cuda.current_stream(self._device).synchronize()  # before the trainer may write again

    def forget(self) -> None:
        self._host.forget()


@dataclass(frozen=True)
class Shared:
    """CUDA memory that other processes of this host may open, any number of times.

    location: how they do. counter: where torch counts who has it open: one, from the beginning.
    """

    location: str
    counter: tuple[bytes, int]

    def release(self) -> None:
        """Nobody reads it any more. Until then torch keeps the memory, also without a tensor of it."""
        torch.UntypedStorage._release_ipc_counter_cuda(*self.counter)


def share(flat: torch.Tensor) -> Shared:
    """Let other processes of this host open the CUDA memory of `flat`."""
    told = flat.untyped_storage()._share_cuda_()
    fields = dict(zip(_FIELDS, told, strict=True))
    counter = tuple(fields.pop(name) for name in _COUNTER)
    plain = {name: base64.b64encode(v).decode() if name in _BYTES else v for name, v in fields.items()}
    return Shared(_SCHEME + json.dumps(plain), counter)


def open_shared(location: str, device: torch.device) -> torch.Tensor:
    """The memory that `share` named, as bytes on `device`."""
    plain = json.loads(location.removeprefix(_SCHEME))
    fields = {name: base64.b64decode(value) if name in _BYTES else value for name, value in plain.items()}
    fields |= zip(_COUNTER, _UNCOUNTED, strict=True)
    fields["device"] = device.index or 0  # the same GPU may have another number in this process
    torch.cuda.init()  # what follows does not, and a process that has not used CUDA yet would crash
    storage = torch.UntypedStorage._new_shared_cuda(*(fields[name] for name in _FIELDS))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
