"""The connector of capture engines: hidden states of finished requests go out of the KV cache into files.

vLLM's own copies request by request in the thread that launches the model's kernels, so that the GPU waits for it.
Here that thread marks what the GPU has computed and goes on; another one takes whatever finished in a step out of the
cache, many requests together, and the base class's threads write the files. The same code runs without CUDA.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

COPIED_BYTES = 2**26
"""States that are copied together, at most, unless one request has more: each copy needs as much memory on the GPU
beside the KV cache, and page-locked memory on the host until its files are written."""

log = init_logger(__name__)


class _Copied(threading.Event):
    """Stands where the base class keeps the CUDA event of a request's copy: its blocks are free once it is set."""

    query, synchronize = threading.Event.is_set, threading.Event.wait


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens] of each request that asked for them.

    A request's lock file is held from before its answer until its file is complete, or the engine dies.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="lockstep-capture")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleHiddenStatesConnectorMetadata:
        """Without the requests that nobody asked states of: their files would fill the disk."""
        meta = super().build_connector_meta(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            if not (request.sampling_params.extra_args or {}).get("kv_transfer_params"):
                del self._request_filenames[request.req_id], meta.new_req_filenames[request.req_id]
        return meta

    def bind_connector_metadata(self, connector_metadata: ExampleHiddenStatesConnectorMetadata) -> None:
        """Begin with the requests that have finished, before this step's kernels are launched: their states were
        computed by earlier ones, and copying them need not wait for these."""
        super().bind_connector_metadata(connector_metadata)
        finished, connector_metadata.pending_saves = connector_metadata.pending_saves, []
        if not finished or not self._is_tp_rank_zero:
            return
        computed = None
        if self._kv_cache.is_cuda:
            computed = torch.cuda.Event(blocking=True)  # who waits for it sleeps, and holds up no kernel launches
            computed.record()
        copied = _Copied()
        locks = {one.req_id: self._lock_fds.pop(one.req_id, None) for one in finished}
        self._req_copy_events |= dict.fromkeys(locks, copied)
        self._copier.submit(self._save, finished, locks, computed, copied)

    def _save(
        self,
        finished: list[PendingSave],
        locks: dict[str, int | None],
        computed: torch.cuda.Event | None,
        copied: _Copied,
    ) -> None:
        """Copy the states of these requests and have them written. In the copier's thread.

        locks: descriptors of their lock files, closed here for those that cannot be copied.
        """
        try:
            if computed is not None:
                computed.synchronize()
            for together in _portions(finished, self._kv_cache[0].nbytes):
                pages = self._copy([block for one in together for block in one.block_ids])
                for one, own in zip(together, pages.split([len(one.block_ids) for one in together]), strict=True):
                    states = own.flatten(0, 1)[: len(one.token_ids)]
                    tensors = {"hidden_states": states, "token_ids": one.token_ids}
                    writing = self._executor.submit(
                        self._write_tensors, tensors, _nothing_left, one.filename, locks.pop(one.req_id)
                    )
                    writing.add_done_callback(partial(self._on_write_done, one.req_id))
        except Exception:  # whoever waits for the files is told by the locks that they will not come
            log.exception("hidden states of %d requests are lost", len(locks))
        finally:
            copied.set()
            for lock in filter(None, locks.values()):
                os.close(lock)

    def _copy(self, blocks: list[int]) -> torch.Tensor:
        """[len(blocks), tokens of a block, layers, hidden], on the host."""
        cache = self._kv_cache.transpose(1, 2)  # as it lies in memory: one block is one piece
        if not cache.is_cuda:
            return cache.index_select(0, torch.tensor(blocks, dtype=torch.long))
        index = torch.tensor(blocks, dtype=torch.long, pin_memory=True)
        with torch.cuda.device(cache.device), torch.cuda.stream(self._get_copy_stream()):
            pages = cache.index_select(0, index.to(cache.device, non_blocking=True))
            host = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
            host.copy_(pages, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        arrived.synchronize()
        return host


_nothing_left = _Copied()
_nothing_left.set()


def _portions(finished: list[PendingSave], block_bytes: int) -> Iterator[list[PendingSave]]:
    """Requests whose states are copied together, in their order."""
    portion, size = [], 0
    for one in finished:
        more = block_bytes * len(one.block_ids)
        if portion and size + more > COPIED_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(one)
        size += more
    if portion:
        yield portion
