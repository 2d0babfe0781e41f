"""A group of one trainer and its engines that broadcast to each other: NCCL on GPUs, gloo on CPU, the same calls.

It meets at a TCP store of the trainer's, where each side also leaves the reason when it gives up, so that the other can
name it. Nothing is pickled.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist

from infra.transport.base import SyncError

_POLL_S, _POLL_SHARE = 0.0002, 0.1
"""A bucket is looked for again after so many seconds, or this share of the time it has taken so far."""
_MEET_POLL_S = 0.005
_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""A group's errors are raised where it is waited for. By default torch's watchdog would end the whole process instead:
an engine because its trainer died, or the trainer because an engine did."""
_making = threading.Lock()
"""Groups of several ranks are joined at once, by threads that share the environment."""


class Meeting:
    """One group's place in the trainer's store: `tcp://HOST:PORT/NAME?members=N&stall_s=S`."""

    def __init__(self, location: str, store: dist.TCPStore | None = None) -> None:
        """store: the trainer's own; engines connect to it.

        Raises SyncError when the trainer does not answer.
        """
        at = urlsplit(location)
        query = {name: values[0] for name, values in parse_qs(at.query).items()}
        self.location = location
        self.members, self.stall_s = int(query["members"]), float(query["stall_s"])
        try:
            self._store = store or dist.TCPStore(at.hostname, at.port, timeout=timedelta(seconds=self.stall_s))
        except (dist.DistError, RuntimeError) as error:
            raise SyncError(
                f"the trainer's process at {at.hostname}:{at.port} does not answer: did the trainer die?"
            ) from error
        self._names = dist.PrefixStore(at.path.strip("/"), self._store)

    def join(
        self, device: torch.device, *, trainer: bool, cancelled: Callable[[], bool] = lambda: False
    ) -> dist.ProcessGroup:
        """The group, once every member is there; the trainer has rank 0.

        Raises SyncError saying how many came in time, or once `cancelled()`.
        """
        rank = 0 if trainer else self._engines(1)
        if rank >= self.members:
            raise SyncError(f"the trainer broadcasts to {self.members - 1} engines, this is one more")
        names, bound = dist.PrefixStore("group", self._names), timedelta(seconds=self.stall_s)
        try:
            self._wait_for_all(cancelled)  # NCCL itself would wait for ever for one that does not come
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = bound
                with _making, _variables(_NCCL):
                    return dist.ProcessGroupNCCL(names, rank, self.members, options)
            return dist.ProcessGroupGloo(names, rank, self.members, bound)
        except SyncError:
            raise
        except (dist.DistError, RuntimeError) as error:
            told = f"{self._engines(0)} of {self.members - 1} engines joined the broadcast within {self.stall_s:g} s"
            raise SyncError(self.cause(told)) from error

    def _wait_for_all(self, cancelled: Callable[[], bool]) -> None:
        started, here = time.monotonic(), self._names.add("members", 1)
        while here < self.members:
            if cancelled():
                raise SyncError("given up")
            if time.monotonic() - started > self.stall_s:
                raise dist.DistError("not all members came")
            time.sleep(_MEET_POLL_S)
            here = self._names.add("members", 0)

    def _engines(self, more: int) -> int:
        """How many have come, `more` of them just now."""
        try:
            return self._names.add("engines", more)
        except (dist.DistError, RuntimeError) as error:
            raise SyncError("the trainer's process is gone: did the trainer die?") from error

    def fail(self, who: str, reason: str) -> None:
        """Leave word that this side gave up. A store that is gone has no reader either."""
        with suppress(dist.DistError, RuntimeError):
            self._names.set(f"failed:{who}", reason)

    def cause(self, seen: str, other: str = "") -> str:
        """What was `seen` here, and what the `other` side left word of, if it did."""
        with suppress(dist.DistError, RuntimeError):
            if other and self._names.check([f"failed:{other}"]):
                return f"{seen}; the {other} failed: {self._names.get(f'failed:{other}').decode()}"
        return seen


def broadcast(
    group: dist.ProcessGroup, buckets: Sequence[torch.Tensor], stall_s: float, cancelled: Callable[[], bool]
) -> None:
    """Send (rank 0) or receive every bucket, in order, all of them on their way at once.

    Raises SyncError when none arrives for `stall_s` seconds, when a member is gone, or once `cancelled()`; of the group
    nothing is left then.
    """
    try:
        _broadcast(group, buckets, stall_s, cancelled)
    except SyncError:
        leave(group, buckets[0].device)
        raise


def leave(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give up a group on `device`, whatever is on its way: a GPU would go on waiting for it, and keep its buffers."""
    if device.type == "cuda":
        group.abort()


def _broadcast(
    group: dist.ProcessGroup, buckets: Sequence[torch.Tensor], stall_s: float, cancelled: Callable[[], bool]
) -> None:
    options = dist.BroadcastOptions()
    options.timeout = timedelta(seconds=2 * stall_s)  # the group's own end, should nobody look here in time
    try:
        works = [group.broadcast([bucket], options) for bucket in buckets]
    except RuntimeError as error:  # NCCL connects the members with the first one
        raise SyncError(f"the other side cannot be reached ({_first(error)})") from error
    for done, work in enumerate(works):
        started = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - started
            if cancelled():
                raise SyncError("given up")
            if waited > stall_s:
                raise SyncError(f"bucket {done + 1} of {len(works)} did not arrive within {stall_s:g} s: it stalled")
            time.sleep(max(_POLL_S, _POLL_SHARE * waited))
        try:
            work.wait()
        except RuntimeError as error:
            raise SyncError(f"bucket {done + 1} of {len(works)}: the other side is gone ({_first(error)})") from error


@contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    """These environment variables for the time of the context, where they are not set."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
