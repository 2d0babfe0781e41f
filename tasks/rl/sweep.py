"""Engine settings for rollouts: which to try, alone and then the best of them together, and which to propose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.config.target import EngineConfig

if TYPE_CHECKING:
    from tasks.rl.measure import RolloutOptions

CONFIGURED, CHAT, TOGETHER = "configured", "chat defaults", "best together"
FACTORS = (1 / 4, 1 / 2, 2, 4)
"""What `--sweep` tries of sequences and tokens a step, in multiples of the configured ones."""
CACHE_FACTORS = (1 / 2, 2)
MOST_GPU_MEMORY = 0.9
WITHIN = 0.02
"""Speeds so close to the fastest count as equal: of those the configured value stays, or the smallest is taken."""


@dataclass(frozen=True)
class Setting:
    """An engine to measure. knob: the setting of it that is tried alone; empty where none is or several are."""

    name: str
    engine: EngineConfig
    knob: str = ""

    @property
    def value(self) -> Any:
        """Of the knob."""
        return getattr(self.engine, self.knob)


def settings(engine: EngineConfig, options: "RolloutOptions", requests: int) -> list[Setting]:
    """The configured ones first, then a chat server's, then those to try, one knob at a time.

    requests: at once at most; more sequences than that make no difference.
    """
    from infra.engine.pin import accelerated

    cache = "gpu_memory_fraction" if accelerated() else "kv_cache_gib"
    tried = {
        "max_concurrent_sequences": ("{} sequences", options.concurrent),
        "max_batched_tokens": ("{} tokens a step", options.batched),
        cache: ("cache {:g}", options.cache),
        "eager": ("CUDA graphs", [False] if options.graphs else []),
    }
    found = [
        Setting(name.format(value), changed(engine, **{knob: value}), knob)
        for knob, (name, given) in tried.items()
        for value in given or (_around(engine, knob, requests) if options.sweep else [])
    ]
    return [Setting(CONFIGURED, engine), *([_chat(engine)] if found else []), *found]


def together(measured: Sequence[tuple[Setting, float]]) -> Setting | None:
    """The best value of each knob in one engine; none where fewer than two differ from the configured ones.

    measured: settings with their tokens/s, the configured ones first.
    """
    engine, plain = measured[0][0].engine, measured[0][1]
    best: dict[str, Any] = {}
    for knob in dict.fromkeys(setting.knob for setting, _ in measured if setting.knob):
        speeds = {setting.value: speed for setting, speed in measured if setting.knob == knob}
        enough = (1 - WITHIN) * max(plain, *speeds.values())
        if plain < enough:
            best[knob] = min(value for value, speed in speeds.items() if speed >= enough)
    return Setting(TOGETHER, changed(engine, **best)) if len(best) > 1 else None


def proposed(measured: Sequence[tuple[Setting, float]]) -> tuple[Setting, float]:
    """The first of those that are as good as the fastest; a chat server's settings are none to propose."""
    own = [(setting, speed) for setting, speed in measured if setting.name != CHAT]
    fastest = max(speed for _, speed in own)
    return next((setting, speed) for setting, speed in own if speed >= (1 - WITHIN) * fastest)


def flags(setting: Setting, configured: EngineConfig) -> str:
    """What makes the configured engine this one, as on the command line."""
    before, after = configured.model_dump(), setting.engine.model_dump()
    return " ".join(f"--set engine.{name}={_toml(after[name])}" for name in after if after[name] != before[name])


def changed(engine: EngineConfig, **values: Any) -> EngineConfig:
    """`engine` with other settings, and a token a step for every sequence."""
    both = engine.model_dump() | values
    batched = max(both["max_batched_tokens"], both["max_concurrent_sequences"])
    return EngineConfig.model_validate(both | {"max_batched_tokens": batched})


def _around(engine: EngineConfig, knob: str, requests: int) -> list[Any]:
    """Values to try round the configured one."""
    value = getattr(engine, knob)
    if knob == "eager":
        from infra.engine.pin import accelerated

        return [False] if value and accelerated() else []
    if knob == "max_concurrent_sequences":
        return [round(value * f) for f in FACTORS if 1 <= round(value * f) <= requests]
    if knob == "max_batched_tokens":
        return [round(value * f) for f in FACTORS if round(value * f) >= max(32, engine.max_concurrent_sequences)]
    top = MOST_GPU_MEMORY if knob == "gpu_memory_fraction" else float("inf")
    return list(dict.fromkeys(min(top, value * f) for f in CACHE_FACTORS if min(top, value * f) != value))


def _chat(engine: EngineConfig) -> Setting:
    """What vLLM's own API server takes on this machine when nothing is said; memory as configured."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from infra.engine.pin import accelerated

    tokens, sequences = (
        limit[UsageContext.OPENAI_API_SERVER] for limit in EngineArgs.get_batch_defaults(engine.tensor_parallel)
    )
    eager = engine.eager and not accelerated()
    return Setting(CHAT, changed(engine, max_concurrent_sequences=sequences, max_batched_tokens=tokens, eager=eager))


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
