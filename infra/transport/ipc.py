"""The `ipc` transport: an engine on the trainer's own GPU reads the trainer's memory there, without a copy in between.

CUDA's handle of the memory travels as plain fields, never as a pickle. On CPU the same two classes share host memory.
"""

import base64
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
_BYTES = {"handle", "ref_counter_handle", "event_handle"}


class IpcSender(Publisher):
    """Packs weights into one piece of memory of the device they are on, which is reused from version to version."""

    transport = "ipc"

    def __init__(self, dtype: str | None = None, reach: Reach = SAME_HOST) -> None:
        super().__init__(dtype, reach)
        self._host = ShmSender(dtype, reach)
        self._flat: torch.Tensor | None = None
        self._location = ""

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
            self._flat = torch.empty(size, dtype=torch.uint8, device=device)
            self._location = share(self._flat)  # once: each handle adds a reference count to the memory
        params = fill(self._flat, tensors, slots)
        torch.cuda.current_stream(device).synchronize()  # another process reads next
        return self._announce(version, self._location, params, started)

    def close(self) -> None:
        """Free the memory. May be called again."""
        self._flat = None
        self._host.close()


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


def share(flat: torch.Tensor) -> str:
    """How another process of this host opens the CUDA memory of `flat`."""
    told = flat.untyped_storage()._share_cuda_()
    fields = dict(zip(_FIELDS, told, strict=True))
    plain = {name: base64.b64encode(v).decode() if name in _BYTES else v for name, v in fields.items()}
    return _SCHEME + json.dumps(plain)


def open_shared(location: str, device: torch.device) -> torch.Tensor:
    """The memory that `share` named, as bytes on `device`."""
    plain = json.loads(location.removeprefix(_SCHEME))
    fields = [base64.b64decode(plain[name]) if name in _BYTES else plain[name] for name in _FIELDS]
    fields[0] = device.index or 0  # the same GPU may have another number in this process
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
