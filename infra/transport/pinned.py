"""Memory of the host that a GPU copies into by itself."""

import weakref

import torch


def host_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """uint8 [size], touched: fresh memory costs more than a copy into it.

    pinned: a GPU copies into it at the full speed of its link, and needs no thread of the host's meanwhile. It is as
    large as asked for, where torch's own pinned memory takes the next power of two.
    Raises RuntimeError when so much cannot be pinned.
    """
    flat = torch.zeros(size, dtype=torch.uint8)
    if pinned and size:
        runtime, address = torch.cuda.cudart(), flat.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
        weakref.finalize(flat, runtime.cudaHostUnregister, address).atexit = False
    return flat
