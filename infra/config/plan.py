"""What a run will need, said before it starts: memory, bytes to move, disk and time."""

import json
import math
import shutil
import statistics
from pathlib import Path

import psutil
from pydantic import BaseModel

from infra.config.flows import DrafterFlowConfig, FlowConfig, LoopConfig, QuantizeFlowConfig, RLFlowConfig
from infra.config.memory import (
    CHECKPOINT_BYTES,
    DTYPE_BYTES,
    GIB,
    Shape,
    Sides,
    beside_gpus,
    gpu_bytes,
    misfit,
    on_gpu,
    on_host,
    trained,
)
from infra.config.reach import out_of_reach
from infra.services import runs
from infra.services.durations import measured
from infra.services.home import home
from infra.store.models import location
from infra.store.tensor_files import read_header

PROMPT_TOKENS = 64  # of a typical prompt: only sizes estimates


class PlanError(RuntimeError):
    """This machine has too little memory or disk for the run, or its engines cannot reach the trainer's weights."""


class Plan(BaseModel):
    """Estimates for one run of a flow.

    model: None while the source has not been prepared; then figures that depend on it are None too.
    sides: memory of an engine and of the trainer, bytes. misfit: why they do not fit on this machine's GPUs, if so.
    unreachable: why engines could not reach the trainer's weights, if so.
    memory, disk: bytes at the peak, and bytes that stay. memory_free, disk_free: what this machine has now, bytes.
    sync: bytes that one weight update moves to each engine; syncs: number of updates.
    hidden_states: bytes of the drafter's captured states.
    minutes: median of the finished runs with this configuration, else of those with this target, else what the loop
        takes elsewhere with the preset of this name, else None.
    """

    flow: str
    model: Shape | None
    sides: Sides | None
    misfit: str
    unreachable: str
    memory: int | None
    memory_free: int
    disk: int | None
    disk_free: int
    sync: int | None
    syncs: int
    hidden_states: int | None
    minutes: float | None

    def require(self) -> None:
        """Raises PlanError when the machine has too little memory or disk, or weights would not reach the engines."""
        if self.unreachable:
            raise PlanError(self.unreachable)
        if self.misfit:
            raise PlanError(f"too little GPU memory: {self.misfit}")
        smaller = (
            "have fewer engines or trainer ranks, rl.transport=ipc or cluster.sleep_level=2"
            if gpu_bytes()
            else "lower engine.kv_cache_gib or micro_batch_tokens"
        )
        for what, need, free, cure in (
            ("memory", self.memory, self.memory_free, f"{smaller}, or free some"),
            ("disk", self.disk, self.disk_free, f"free some in {home()}, or set LOCKSTEP_HOME to a larger disk"),
        ):
            if need is not None and need > free:
                raise PlanError(
                    f"too little {what}: {self.flow} needs about {need / GIB:.1f} GiB, {free / GIB:.1f} GiB are free; "
                    f"{cure}"
                )

    def as_json(self, config: FlowConfig) -> str:
        """Configuration and plan as one JSON object."""
        return json.dumps({"config": config.model_dump(mode="json"), "plan": self.model_dump(mode="json")})

    def as_text(self, config: FlowConfig) -> str:
        """Configuration and plan for people; the configuration as `--set` would name it."""
        later = "known once the model has been prepared by a first run"
        model = f"{self.model.parameters / 1e6:.1f} M parameters, {self.model.layers} layers" if self.model else later
        rows = {
            "model": model,
            "memory at the peak": f"{_size(self.memory) or later} of {_size(self.memory_free)} free",
            "each engine": _size(self.sides and self.sides.engine) or later,
            "trainer": _size(self.sides and self.sides.trainer) or later,
            "disk": f"{_size(self.disk) or later} of {_size(self.disk_free)} free",
        }
        if self.syncs:
            rate = (
                f"{self.syncs} updates of {_size(self.sync)} to each engine: {_size(self.sync)}/s for one second each"
            )
            rows["weight sync"] = rate if self.sync else later
        if self.hidden_states is not None or isinstance(config, LoopConfig | DrafterFlowConfig):
            rows["hidden states"] = self._states_text(config) or later
        if self.sides and not self.sides.trainer:
            del rows["trainer"]
        rows["time"] = f"about {self.minutes:.1f} min" if self.minutes else "unknown: none has finished here yet"
        width = max(map(len, rows))
        plan = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
        return "\n".join(["configuration", *_settings(config.model_dump(mode="json")), "plan", *plan])

    def _states_text(self, config: FlowConfig) -> str:
        if self.model is None or not self.hidden_states:
            return "none: this kind of drafter needs none" if self.hidden_states == 0 else ""
        told = f"{_size(self.hidden_states)}, {_size(_bytes_per_token(self.model, config))} a token"
        return f"{told}, at once: streamed" if config.drafter.stream else f"{told}, kept"


def _bytes_per_token(shape: Shape, config: FlowConfig) -> int:
    """Of the hidden states of an EAGLE-3 head: three layers and the last."""
    return 4 * shape.hidden * DTYPE_BYTES[config.engine.dtype]


def make_plan(flow: str, config: FlowConfig) -> Plan:
    """The plan of running `flow` with `config` on this machine. Reads sizes only, and imports no model library."""
    shape = _shape(location(config.target.source))
    hidden = _hidden_states(shape, config)
    trains = isinstance(config, RLFlowConfig | LoopConfig)
    sides = _sides(shape, config)
    memory = shape and (beside_gpus if gpu_bytes() else on_host)(shape, config)
    root = home()
    while not root.exists():
        root = root.parent
    return Plan(
        flow=flow,
        model=shape,
        sides=sides,
        misfit=misfit(sides, gpu_bytes(), config) if sides and gpu_bytes() and trains else "",
        unreachable=out_of_reach(config) if gpu_bytes() and trains else "",
        memory=memory and memory.total(config.cluster.engines),
        memory_free=psutil.virtual_memory().available,
        disk=_disk(shape, config, hidden or 0),
        disk_free=shutil.disk_usage(root).free,
        sync=shape and shape.parameters * DTYPE_BYTES[config.engine.dtype],
        syncs=config.rl.steps if trains else 0,
        hidden_states=hidden,
        minutes=_minutes(flow, config),
    )


def _shape(folder: Path) -> Shape | None:
    if not (folder / "config.json").is_file():
        return None
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    return Shape(
        parameters=sum(_stored(path) for path in folder.glob("*.safetensors")),
        hidden=text["hidden_size"],
        vocab=text["vocab_size"],
        layers=text["num_hidden_layers"],
    )


def _stored(path: Path) -> int:
    """Number of values in a safetensors file, from its header alone."""
    with path.open("rb") as file:
        return sum(math.prod(tensor["shape"]) for tensor in read_header(file).values())


def _sides(shape: Shape | None, config: FlowConfig) -> Sides | None:
    if shape is None:
        return None
    if gpu_bytes() and isinstance(config, RLFlowConfig | LoopConfig):
        return on_gpu(shape, config)
    return on_host(shape, config)


def _disk(shape: Shape | None, config: FlowConfig, hidden_states: int) -> int | None:
    if shape is None:
        return None
    weights = shape.parameters * 4
    total = hidden_states + weights  # version 1 as converted
    if isinstance(config, RLFlowConfig | LoopConfig):
        total += weights + config.rl.keep_checkpoints * trained(shape, config) * CHECKPOINT_BYTES
    if isinstance(config, LoopConfig | QuantizeFlowConfig):
        total += weights // 2
    return total


def _hidden_states(shape: Shape | None, config: FlowConfig) -> int | None:
    if shape is None or not isinstance(config, DrafterFlowConfig | LoopConfig):
        return None
    if config.drafter.kind != "eagle3":
        return 0
    tokens = sum(source.prompts for source in config.drafter.traffic) * (PROMPT_TOKENS + config.drafter.max_new_tokens)
    captured = tokens * _bytes_per_token(shape, config)
    return min(captured, int(config.drafter.capture_budget_gib * GIB))


def _minutes(flow: str, config: FlowConfig) -> float | None:
    finished = [r for r in runs.every(flow) if r.status in ("finished", "refused") and len(r.flow_run_ids) == 1]
    same = [r for r in finished if r.config_digest == runs.config_digest(flow, config)]
    alike = same or [r for r in finished if r.target == config.target.name]
    if alike:
        return statistics.median((r.finished - r.started).total_seconds() for r in alike) / 60
    elsewhere = measured(config.target.name).get(flow)
    return None if elsewhere is None else elsewhere / 60


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _settings(values: dict, prefix: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += _settings(value, f"{prefix}{name}.")
        else:
            lines.append(f"  {prefix}{name} = {json.dumps(value)}")
    return lines
