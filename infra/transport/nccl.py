"""The `nccl` transport: the trainer's rank 0, or every rank its share, broadcasts packed buckets to engines on other
GPUs, on its own stream.

On CPU the same code broadcasts over gloo.
"""

import itertools
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from infra.transport.base import SAME_HOST, Fetch, Published, Reach, SyncError
from infra.transport.flat import fill, flat_bytes, lay_out, view
from infra.transport.group import Meeting, broadcast, leave
from infra.transport.publisher import Publisher
from infra.transport.shares import parts

BUCKET_BYTES = 256 * 2**20


class NcclSender(Publisher):
    """Packs weights and broadcasts each version, in a thread, once every engine has joined.

    The engines' group is kept from version to version, and made anew after a version that did not arrive. It is for
    networks where whoever reaches the trainer may read its weights: a group has no keys.
    """

    transport = "nccl"

    def __init__(self, dtype: str | None = None, reach: Reach = SAME_HOST) -> None:
        super().__init__(dtype, reach)
        self._host = _address()
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()
        self._meeting: Meeting | None = None
        self._group: dist.ProcessGroup | None = None
        self._flat: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._sending: _Sending | None = None
        self.failure = ""
        """Why the last version did not reach every engine; empty when it did."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], engines: int = 1) -> Published:
        """Copy `named_tensors` (Hugging Face names, all on one device) and broadcast them as `version`.

        A version that is still on its way is given up. Raises SyncError when a tensor holds values that are not finite.
        """
        started = time.monotonic()
        self._give_up()
        tensors, slots, size = lay_out(named_tensors, self.dtype)
        device = next(iter(tensors.values())).device
        if self._flat is None or self._flat.numel() != size or self._flat.device != device:
            self._flat = torch.empty(size, dtype=torch.uint8, device=device)
        params = fill(self._flat, tensors, slots)
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            torch.cuda.current_stream(device).synchronize()  # the other stream reads next
        return self._announce(version, self._broadcast(version, engines), params, started)

    def offer(self, engines: int) -> Published:
        """The version published last, broadcast again to `engines` engines. One on its way is given up."""
        self._give_up()
        self._meeting = None  # other engines may come than those that the group was made of
        self._last = self._last.model_copy(update={"location": self._broadcast(self._last.version, engines)})
        return self._last

    def close(self) -> None:
        """Give up what is on its way and free the memory. May be called again."""
        self._give_up()
        self._leave()
        self._flat = self._store = None

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            leave(group, self._flat.device)

    def _broadcast(self, version: int, engines: int) -> str:
        """Send in a thread; where the engines meet."""
        if self._meeting is None or self.failure or self._meeting.members != engines + 1:
            place = f"tcp://{self._host}:{self._store.port}/{next(self._numbers)}"
            location = f"{place}?members={engines + 1}&stall_s={self.reach.stall_s:g}"
            self._leave()
            self._meeting, self.failure = Meeting(location, self._store), ""
        self._sending = _Sending()
        self._sending.thread = threading.Thread(
            target=self._send, args=(version, self._meeting, self._flat, self._sending), daemon=True
        )
        self._sending.thread.start()
        return self._meeting.location

    def _give_up(self) -> None:
        sending, self._sending = self._sending, None
        if sending is None:
            return
        sending.stop.set()
        if sending.met.is_set():
            sending.thread.join(self.reach.stall_s)
        if sending.thread.is_alive():  # it waits for engines, in NCCL perhaps, and will send nothing when they come
            self._meeting = self._group = None

    def _send(self, version: int, meeting: Meeting, flat: torch.Tensor, sending: "_Sending") -> None:
        try:
            group = self._group or meeting.join(flat.device, trainer=True, cancelled=sending.stop.is_set)
            sending.met.set()
            if sending.stop.is_set():
                raise SyncError("given up")
            self._group = group
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                broadcast(group, [_number(version, flat), *_buckets(flat)], meeting.stall_s, sending.stop.is_set)
        except Exception as error:  # told to the engines, and to whoever publishes next
            meeting.fail("trainer", str(error))
            if meeting is self._meeting:
                self._group = None
                self.failure = meeting.cause(str(error), other="engine")


class _Sending:
    """A broadcast in its thread. met: its engines have come, so that `stop` takes effect at once, unless one dies while
    NCCL connects them: that waits for ever."""

    def __init__(self) -> None:
        self.stop, self.met = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None


class NcclSource:
    """Receives broadcasts into memory of its own, which is kept from version to version.

    Where several ranks send, each has a group of its own with the engines, and all are received from at once.
    """

    lands = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._met: dict[str, tuple[Meeting, dist.ProcessGroup]] = {}
        self._flat: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._stop = threading.Event()

    @contextmanager
    def open(self, published: Published) -> Iterator[Fetch]:
        self._stop.clear()
        if self._device.type == "cuda":  # the model's own stream has steps to do first
            self._stream = self._stream or torch.cuda.Stream(self._device)
        size, wanted = flat_bytes(published.params), parts(published)
        flat = self._flat
        if flat is None or flat.numel() != size:
            flat = self._flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._leave(set(self._met) - {where for where, _, _ in wanted})
        failure = None
        with ThreadPoolExecutor(len(wanted)) as pool:
            pieces = [
                pool.submit(self._receive, where, flat[start:stop], published.version) for where, start, stop in wanted
            ]
            for piece in as_completed(pieces):
                if error := piece.exception():
                    failure = failure or error
                    self._stop.set()  # the others need not go on
        if failure:
            self._leave(set(self._met))
            self.forget()
            raise failure
        yield partial(view, flat)

    def forget(self) -> None:
        self._stop.set()
        self._met, self._flat = {}, None

    def _receive(self, location: str, flat: torch.Tensor, version: int) -> None:
        """Receive one rank's share into `flat`, its piece of the memory."""
        if flat.device.type == "cuda":
            torch.cuda.set_device(flat.device)
        meeting = None
        try:
            meeting, group = self._join(location)
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                number = _number(-1, flat)
                broadcast(group, [number, *_buckets(flat)], meeting.stall_s, self._stop.is_set)
                found = int(number)
            if found != version:
                raise SyncError(f"version {version} was announced, but version {found} was broadcast")
        except SyncError as error:
            told = str(error)
            self._met.pop(location, None)  # nothing is left of its group
            if meeting:
                told = meeting.cause(told, other="trainer")
                meeting.fail("engine", str(error))
            raise SyncError(told) from error

    def _join(self, location: str) -> tuple[Meeting, dist.ProcessGroup]:
        if location not in self._met:
            meeting = Meeting(location)
            self._met[location] = meeting, meeting.join(self._device, trainer=False, cancelled=self._stop.is_set)
        return self._met[location]

    def _leave(self, locations: Iterable[str]) -> None:
        for location in locations:
            if met := self._met.pop(location, None):
                leave(met[1], self._device)


def _number(version: int, flat: torch.Tensor) -> torch.Tensor:
    return torch.tensor([version], dtype=torch.int64, device=flat.device)


def _buckets(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(BUCKET_BYTES))


def _address() -> str:
    """This host's own address as other hosts reach it; loopback when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
