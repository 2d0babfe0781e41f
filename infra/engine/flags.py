"""An EngineSpec as vLLM's command line and environment."""

import json
import os
import secrets
import tempfile
from pathlib import Path

from infra.engine.pin import accelerated
from infra.engine.recorder import VARIABLE as RECORDING_VARIABLE
from infra.engine.spec import EngineSpec, Role
from infra.services.home import home

KEY_VARIABLE = "LOCKSTEP_ENGINE_KEY"
LABEL_VARIABLE = "LOCKSTEP_ENGINE_LABEL"
PINNED_VARIABLE = "LOCKSTEP_ENGINE_PINNED"
SHARED_MEMORY_VARIABLE = "LOCKSTEP_ENGINE_SHARED_MEMORY"
SCRATCH_VARIABLE = "LOCKSTEP_ENGINE_SCRATCH"
LONGEST_TEMPORARY = 45
"""Characters of the system's temporary folder: paths of sockets, at most 107, add a folder (25) and a uuid (37)."""
SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads that wait for each other sleep instead of spinning. Spinning threads lose a core as soon as anything
else runs on it: two of them decoded SmolLM2-135M at 19 tokens/s beside two busy processes, sleeping ones at 120."""


def arguments(spec: EngineSpec, gpus: bool | None = None) -> list[str]:
    """Flags of vLLM's API server. The access key is not among them: command lines are public on a machine.

    gpus: whether the engine runs on GPUs; by default as engines on this machine do.
    """
    config = spec.config
    gpus = accelerated() if gpus is None else gpus
    flags = [
        f"--model={spec.model}",
        f"--served-model-name={spec.model_name}",
        f"--host={spec.host}",
        f"--dtype={config.dtype}",
        f"--max-model-len={config.max_model_len}",
        f"--max-num-seqs={config.max_concurrent_sequences}",
        f"--max-num-batched-tokens={config.max_batched_tokens}",
        f"--seed={spec.seed}",
        "--middleware=infra.engine.middleware.KeyGuard",
        # What a request does not say is vLLM's own default, not the model folder's generation_config.json.
        "--generation-config=vllm",
        "--disable-uvicorn-access-log",
    ]
    if spec.matched:
        flags.append("--hf-overrides=" + json.dumps({"head_dtype": "float32"}))
    if config.eager or spec.capture:  # graphs are of decode steps, and who captures only reads
        flags.append("--enforce-eager")
    if gpus:
        flags.append(f"--gpu-memory-utilization={config.gpu_memory_fraction}")
        flags.append(f"--tensor-parallel-size={config.tensor_parallel}")
        if spec.role is Role.rollout:
            flags.append("--enable-sleep-mode")
    else:
        flags.append(f"--kv-cache-memory-bytes={int(config.kv_cache_gib * 2**30)}")
    if spec.role.has_rl_endpoints:
        flags.append("--enable-scale-out")
        flags.append("--weight-transfer-config=" + json.dumps({"backend": "lockstep"}))
        flags.append("--worker-extension-cls=infra.transport.worker.TransferCalls")
    if spec.role is Role.rollout:
        # The log-probs of the distribution that was sampled from: after temperature, top_k and top_p.
        flags.append("--logprobs-mode=processed_logprobs")
    if spec.recording.share:
        flags.append("--middleware=infra.engine.recorder.RequestRecorder")
    if spec.role is Role.serve:
        flags.append("--middleware=infra.engine.middleware.FirstByte")
    else:
        flags.append("--max-logprobs=-1")
    if spec.speculation:
        flags.append("--speculative-config=" + json.dumps(_speculative(spec)))
    if spec.capture:
        flags.append("--speculative-config=" + json.dumps(_extraction(spec)))
        flags.append("--kv-transfer-config=" + json.dumps(_connector(spec)))
        # Hidden states of positions that a cached prefix skips would come from an earlier request.
        flags.append("--no-enable-prefix-caching")
    return flags + config.extra_flags


def make_scratch() -> Path:
    """A folder for the sockets and temporary files of one engine; its guardian removes it."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="lockstep-engine-", dir=usual if len(usual) <= LONGEST_TEMPORARY else "/tmp"))


def caches() -> dict[str, str]:
    """Where torch keeps what it has compiled, for the next engine too: by itself, in the temporary folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(home() / "compiled")}


def environment(spec: EngineSpec, key: str, scratch: Path) -> dict[str, str]:
    """The engine's environment: this process's own, and what the role and the threads ask for.

    scratch: see `make_scratch`.
    """
    env = caches() | os.environ | settings(spec)
    env |= {
        KEY_VARIABLE: key,
        # vLLM leaves its shared memory behind when it is stopped: under this name its guardian finds and removes it.
        SHARED_MEMORY_VARIABLE: f"lockstep-{secrets.token_hex(4)}-",
        SCRATCH_VARIABLE: str(scratch),
        "TMPDIR": str(scratch),
    }
    env.pop("VLLM_API_KEY", None)
    if not accelerated():
        # vLLM binds OpenMP threads through variables that a forked process no longer reads, and two engines that bind
        # on their own choose the same cores: the threads stay unbound inside the cores this process may use.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads(spec))}
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override --kv-cache-memory-bytes, in whole GiB
    return env


def settings(spec: EngineSpec, gpus: bool | None = None) -> dict[str, str]:
    """What of the environment the spec decides, wherever the engine runs; no secret is among it. gpus: as in
    `arguments`."""
    gpus = accelerated() if gpus is None else gpus
    env = {
        LABEL_VARIABLE: spec.label,
        RECORDING_VARIABLE: spec.recording.model_dump_json(),
        PINNED_VARIABLE: json.dumps(spec.pinned),
        "VLLM_SERVER_DEV_MODE": "1" if spec.role.has_rl_endpoints else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",  # clients keep idle connections for less
    }
    if spec.matched and gpus:
        env["VLLM_BATCH_INVARIANT"] = "1"
    return env if gpus else env | SLEEPING_THREADS


def threads(spec: EngineSpec) -> int:
    """OpenMP threads of the engine on CPU: those asked for, but no more than the cores it may use."""
    return min(spec.config.cpu_threads, len(os.sched_getaffinity(0)))


def _speculative(spec: EngineSpec) -> dict:
    chosen = spec.speculation
    config = {"method": chosen.method, "num_speculative_tokens": chosen.num_speculative_tokens}
    if chosen.schedule:
        config["num_speculative_tokens_per_batch_size"] = chosen.schedule
    if chosen.method == "ngram":
        return config | {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return config | {"model": str(chosen.model), "draft_sample_method": chosen.draft_sampling}


def _extraction(spec: EngineSpec) -> dict:
    layers = {"eagle_aux_hidden_state_layer_ids": spec.capture.layer_ids}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }


def _connector(spec: EngineSpec) -> dict:
    return {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "infra.engine.hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(spec.capture.folder)},
    }
