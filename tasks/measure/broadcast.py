"""The plainest broadcast: one tensor from this process to another one, as the `nccl` transport's group is made.

`python -m tasks.measure.broadcast` is the other one.
"""

import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Work

STALL_S = 120.0
_POLL_S = 5e-5


def broadcast_s(nbytes: int, repeats: int) -> float:
    """Median seconds of one broadcast of `nbytes`: from this GPU to the second one, or on CPU from process to process.

    Raises MeasureError when the other process fails.
    """
    import torch.distributed as dist

    from infra.engine.pin import accelerated
    from tasks.evaluate.measurement import MeasureError
    from tasks.measure.devices import second_gpu

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    location = f"tcp://127.0.0.1:{store.port}/plain?members=2&stall_s={STALL_S:g}"
    command = [sys.executable, "-m", "tasks.measure.broadcast", location, str(nbytes), str(repeats)]
    with second_gpu():
        env = dict(os.environ)
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as other:
        try:
            seconds = _take_part(location, nbytes, repeats, "cuda" if accelerated() else "cpu", store)
        except Exception as error:
            other.kill()
            last = (other.stderr.read().strip().splitlines() or ["it said nothing"])[-1]
            raise MeasureError(f"a plain broadcast failed: {error}; the other process: {last}") from error
    return statistics.median(seconds)


def _take_part(location: str, nbytes: int, repeats: int, kind: str, store=None) -> list[float]:
    """Seconds of each broadcast but the first. store: of the one that sends."""
    import torch
    import torch.distributed as dist

    from infra.transport.group import Meeting, leave

    device = torch.device(kind)
    group = Meeting(location, store).join(device, trainer=store is not None)
    tensor, seconds = torch.ones(nbytes, dtype=torch.uint8, device=device), []
    together = dist.BarrierOptions()
    if kind == "cuda":  # NCCL would guess it from the rank, and says so
        together.device_ids = [torch.cuda.current_device()]
    for _ in range(repeats + 1):
        _done(group.barrier(together))
        started = time.monotonic()
        _done(group.broadcast([tensor], dist.BroadcastOptions()))
        _done(group.barrier(together))  # the sender may be done long before it has arrived
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    leave(group, device)
    return seconds[1:]


def _done(work: "Work") -> None:
    """Wait for it: NCCL's own waiting looks once a millisecond, as long as a third of a gigabyte takes to arrive."""
    while not work.is_completed():
        time.sleep(_POLL_S)
    work.wait()  # raises what became of it


if __name__ == "__main__":
    from infra.engine.pin import accelerated

    _take_part(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "cuda" if accelerated() else "cpu")
