"""Memory that each side of a run takes: an engine, the trainer, and what stands beside them."""

import subprocess
from functools import cache

from pydantic import BaseModel, ConfigDict

from infra.config.flows import DrafterFlowConfig, FlowConfig, LoopConfig, QuantizeFlowConfig, RLFlowConfig

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHT_BYTES = 4  # per parameter, float32
TRAINING_BYTES = 12  # per parameter that is trained: its gradient and two AdamW moments
CHECKPOINT_BYTES = 12  # per parameter that is trained: weights and two moments, once in memory and once on disk
# rounded up from resident memory seen on CPU, GiB: what a process holds beside weights and cache
ENGINE_GIB, TRAINER_GIB, SERVICES_GIB = 1.6, 1.1, 1.6
GPU_PROCESS_GIB = 3.0  # of one that has a CUDA context


class Shape(BaseModel):
    """Sizes of a model, read from its folder. parameters: stored ones, a tied head counts once."""

    parameters: int
    hidden: int
    vocab: int
    layers: int


class Sides(BaseModel):
    """Bytes at the peak. engine: of each engine; trainer: of the trainer; services: Prefect, MLflow and the flow.

    From `on_gpu` engine and trainer are the devices' memory: weights for the engine, which fills the rest of its share
    with KV cache, and weights, gradients, moments, logits and the published copy for the trainer.
    """

    model_config = ConfigDict(frozen=True)

    engine: int
    trainer: int
    services: int

    def total(self, engines: int) -> int:
        """Of one host that holds them all."""
        return self.services + engines * self.engine + self.trainer


def on_host(shape: Shape, config: FlowConfig) -> Sides:
    """What each side takes of the host's memory when it runs on CPU."""
    weights = shape.parameters * DTYPE_BYTES[config.engine.dtype]
    # twice: the engine's own packing of the weights beside the copy that a weight update brings or a file cache holds
    engine = int(ENGINE_GIB * GIB) + 2 * weights + int(config.engine.kv_cache_gib * GIB)
    trainer = 0
    ranks = config.cluster.trainer_ranks
    if isinstance(config, RLFlowConfig | LoopConfig):
        trainer = ranks * (int(TRAINER_GIB * GIB) + _logits(shape, config)) + _training(shape, config)
        trainer += trained(shape, config) * CHECKPOINT_BYTES
    elif isinstance(config, DrafterFlowConfig | QuantizeFlowConfig):
        trainer = ranks * (int(TRAINER_GIB * GIB) + 2 * weights)
    return Sides(engine=engine, trainer=trainer, services=int(SERVICES_GIB * GIB))


def on_gpu(shape: Shape, config: RLFlowConfig | LoopConfig) -> Sides:
    """What an engine and a trainer's rank take of their GPU: an update is staged beside the engine's weights before it
    takes their place."""
    weights = shape.parameters * DTYPE_BYTES[config.engine.dtype]
    published = weights if config.rl.transport in ("ipc", "nccl") else 0
    training = _training(shape, config) // config.cluster.trainer_ranks
    return Sides(engine=2 * weights, trainer=training + _logits(shape, config) + published, services=0)


def beside_gpus(shape: Shape, config: FlowConfig) -> Sides:
    """What each side takes of the host's memory when it computes on GPUs: its process, what it keeps there while it
    sleeps or saves, and weights on their way through host memory."""
    weights = shape.parameters * DTYPE_BYTES[config.engine.dtype]
    engine, trainer = int(GPU_PROCESS_GIB * GIB), 0
    if isinstance(config, RLFlowConfig | LoopConfig):
        copies = {"shm": 1, "store": 2}.get(config.rl.transport, 0)  # store compares with the version before
        read = weights if config.rl.transport == "store" else 0
        asleep = weights if config.cluster.placement != "disaggregated" and config.cluster.sleep_level == 1 else 0
        engine += read + asleep
        trainer = config.cluster.trainer_ranks * int(GPU_PROCESS_GIB * GIB) + copies * weights
        trainer += trained(shape, config) * CHECKPOINT_BYTES
    elif isinstance(config, DrafterFlowConfig | QuantizeFlowConfig):
        trainer = config.cluster.trainer_ranks * int(GPU_PROCESS_GIB * GIB) + 2 * weights
    return Sides(engine=engine, trainer=trainer, services=int(SERVICES_GIB * GIB))


def trained(shape: Shape, config: RLFlowConfig | LoopConfig) -> int:
    """Parameters that the trainer changes; of adapters about as many as all layers of hidden size would have."""
    if config.rl.lora is None:
        return shape.parameters
    per_layer = 7 * 2 * config.rl.lora.rank * 3 * shape.hidden  # seven projections, up to three times as wide
    return min(shape.parameters, shape.layers * per_layer)


def misfit(sides: Sides, gpu: int, config: FlowConfig) -> str:
    """Why engine and trainer do not fit on GPUs of `gpu` bytes, in one line with the figures; empty when they do."""
    share = int(config.engine.gpu_memory_fraction * gpu)
    if sides.engine > share:
        return (
            f"an engine's weights and their update take {_gib(sides.engine)} GiB, engine.gpu_memory_fraction="
            f"{config.engine.gpu_memory_fraction:g} of a GPU is {_gib(share)} GiB: raise it"
        )
    rest = gpu if config.cluster.placement == "disaggregated" else gpu - share
    if sides.trainer > rest:
        beside = "" if config.cluster.placement == "disaggregated" else f" beside an engine's {_gib(share)} GiB"
        return (
            f"the trainer takes {_gib(sides.trainer)} GiB, {_gib(rest)} of {_gib(gpu)} GiB are left for it{beside}: "
            f"lower engine.gpu_memory_fraction or rl.micro_batch_tokens, or set cluster.placement=disaggregated"
        )
    return ""


@cache
def gpu_bytes() -> int | None:
    """Memory of this machine's smallest GPU; none without one."""
    from infra.engine.pin import accelerated

    if not accelerated():
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    sizes = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return min(int(mib) for mib in sizes) * 2**20


def _training(shape: Shape, config: RLFlowConfig | LoopConfig) -> int:
    """Of all ranks together, logits apart."""
    models = 2 if config.rl.kl_coefficient and config.rl.lora is None else 1  # the reference beside the policy
    return models * shape.parameters * WEIGHT_BYTES + trained(shape, config) * TRAINING_BYTES


def _logits(shape: Shape, config: RLFlowConfig | LoopConfig) -> int:
    return 0 if config.rl.gradient_checkpointing else config.rl.micro_batch_tokens * shape.vocab * 4


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}"
