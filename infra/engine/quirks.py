"""Faults of vLLM 0.32 that stay silent, mended in its own processes: one function each, and for each a test in
`tests/engine` that fails once vLLM no longer needs it.
"""

import math
import threading
import time
from functools import wraps

KERNELS = threading.RLock()
"""Held by whoever multiplies by packed matrices: on CPU vLLM's kernels share one scratchpad in a process."""

RECENT_S, NAP_MS = 1.0, 1
"""How long after a message the next one is expected, and how often it is looked for meanwhile."""


def apply() -> None:
    """Mend everything that this platform needs. Called once in each process that vLLM executes."""
    from vllm.platforms import current_platform

    restrict_nothing_when_nothing_was_proposed()
    if current_platform.is_cpu():
        expand_sampling_parameters()
        repack_tied_head_after_reload()
        rewind_generators_of_unfinished_prompts()
        keep_kernels_to_one_thread()
        wait_for_messages_asleep()


def expand_sampling_parameters() -> None:
    """Speculative decoding at temperature > 0 divides logits by uninitialised memory on CPU: the kernel that repeats
    a request's temperature, top_p and top_k for its draft tokens writes them into an int64 copy that nobody reads."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = _expand


def _expand(output, input, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None) -> None:
    """output [tokens]: input [requests], each repeated up to its cumulative number of tokens, `replace_from` replaced
    by `replace_to`."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input == replace_from, torch.full_like(input, replace_to), input)
    output.copy_(values.repeat_interleave(counts))


def restrict_nothing_when_nothing_was_proposed() -> None:
    """An engine that speculates dies of a request with top_k in the first step in which nothing was proposed for any
    request: the largest k of no rows is asked for."""
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_rows(logits, cu_num_draft_tokens, sampling_metadata):
        return constrain(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits

    rejection_sampler.apply_sampling_constraints = constrain_rows


def repack_tied_head_after_reload() -> None:
    """`reload_weights` on CPU writes a tied embedding, but logits are computed from the copy of it that was packed when
    the model was loaded."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    reload = CPUModelRunner.reload_weights

    def reload_and_repack(self, *args, **kwargs) -> None:
        reload(self, *args, **kwargs)
        head = getattr(self.get_model(), "lm_head", None)
        if head is not None and self.model_config.hf_text_config.tie_word_embeddings:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    CPUModelRunner.reload_weights = reload_and_repack


def rewind_generators_of_unfinished_prompts() -> None:
    """A prompt that takes several engine steps is sampled from in each of them, and a seeded request's generator is
    then set back; on CPU that raises, for generators there have no offset, and the engine dies."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, book = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def unfinished(runner) -> set[int]:
        return set(runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist())

    def sample_and_rewind(self, *args, **kwargs):
        rows = unfinished(self)
        before = [(g, g.get_state()) for row, g in self.input_batch.generators.items() if row in rows]
        output = sample(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    def book_without_rewinding(self, *args, **kwargs):
        generators, rows = self.input_batch.generators, unfinished(self)
        self.input_batch.generators = {row: g for row, g in generators.items() if row not in rows}
        try:
            return book(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    CPUModelRunner._sample = sample_and_rewind
    CPUModelRunner._bookkeeping_sync = book_without_rewinding


def keep_kernels_to_one_thread() -> None:
    """Two threads that multiply by packed matrices overwrite each other's scratchpad: a weight update that reads its
    matrices back while the engine decodes would see, and cause, wrong numbers."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    for name in ("execute_model", "sample_tokens"):
        setattr(CPUWorker, name, _holding_kernels(getattr(CPUWorker, name)))


def _holding_kernels(method):
    @wraps(method)
    def hold(self, *args, **kwargs):
        with KERNELS:
            return method(self, *args, **kwargs)

    return hold


def wait_for_messages_asleep() -> None:
    """EngineCore and its worker tell each other of every step through shared memory, and for a second after the last
    message each looks for the next one without a pause, on a core that others need. Asleep, SmolLM2-135M makes 98
    tokens a second in place of 84 on two threads and two cores, for 40% less CPU time; where a core has nothing else to
    do, a tiny model makes 670 in place of 760. Some wake-ups are lost, so those who have just talked look again after a
    millisecond."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def wait_asleep(self, timeout_ms=None) -> None:
        self.busy_loop_s = -math.inf
        recent = time.monotonic() - self.last_read < RECENT_S
        wait(self, NAP_MS if recent else timeout_ms)

    SpinCondition.wait = wait_asleep
