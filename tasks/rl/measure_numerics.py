"""How far engine and trainer are apart, and what nearness costs: `rl.numerics` fast beside matched."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import RLFlowConfig
from infra.config.rl import VerifiersEnvironment
from tasks.evaluate.measurement import Measured, MeasureError

if TYPE_CHECKING:
    from infra.engine.answers import Generation
    from infra.engine.spec import EngineHandle
    from tasks.rl.batch import TrainingBatch

CASES = ("fast", "matched")
FIGURES = {"mean_abs": "nats", "k3": "nats per token", "max_ratio": "ratio"}


class NumericsOptions(Section):
    prompts: int = Field(4, ge=1)
    """Prompts of the configured environments, each answered `rl.group_size` times."""
    answer_tokens: int = Field(64, ge=2)
    """Tokens of every answer."""
    dtype: str = Field("bfloat16", pattern="^(float32|bfloat16)$")
    """Type of engine and trainer."""


class NumericsMeasurement:
    """The same prompts and seeds are sampled by an engine of each kind, and the trainer of that kind is asked for the
    log-probs of what it sampled."""

    help = "Mean |D| between engine and trainer, and the speed of both, with rl.numerics fast and matched."
    config = RLFlowConfig
    options = NumericsOptions

    def measure(self, config: RLFlowConfig, options: NumericsOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError for environments that are played."""
        from infra.store.models import resolve

        if any(isinstance(e, VerifiersEnvironment) for e in config.rl.environments):
            raise MeasureError("numerics are measured on prompts of reasoning_gym and jsonl environments")
        model = resolve(config.target.source)
        prompts = _prompts(model, config, options)
        table = []
        for numerics in CASES:
            rl = config.rl.model_copy(update={"numerics": numerics, "trainer_dtype": options.dtype})
            engine = config.engine.model_copy(update={"dtype": options.dtype})
            case = config.model_copy(update={"rl": rl, "engine": engine})
            say(f"{numerics}: {len(prompts)} answers of {options.answer_tokens} tokens in {options.dtype}")
            table.append({"numerics": numerics, "dtype": options.dtype, **_case(model, case, prompts, options, say)})
        return Measured(_rows(table), table, _findings(table))


def _prompts(model: Path, config: RLFlowConfig, options: NumericsOptions) -> list[list[int]]:
    from transformers import AutoTokenizer

    from tasks.rl.environments.chat import Chat
    from tasks.rl.environments.make import make
    from tasks.rl.environments.problems import Problems

    rl = config.rl
    problems = Problems(rl.environments, make(rl.environments, rl.seed), rl.held_out_share, rl.seed)
    chat = Chat(AutoTokenizer.from_pretrained(model), rl.system_prompt)
    return [chat.prompt(p.messages) for p in problems.take(options.prompts) for _ in range(rl.group_size)]


def _case(
    model: Path, config: RLFlowConfig, prompts: list[list[int]], options: NumericsOptions, say: Callable[[str], None]
) -> dict[str, float]:
    from infra.config.rl import MismatchBounds
    from infra.engine.launch import start
    from infra.engine.spec import EngineSpec, Role
    from tasks.rl.trainer import Trainer

    matched = config.rl.numerics == "matched"
    spec = EngineSpec(model=model, role=Role.rollout, config=config.engine, seed=config.rl.seed, matched=matched)
    with tempfile.TemporaryDirectory() as logs, start(spec, Path(logs), say) as engine:
        answers, seconds = asyncio.run(_sample(engine.handle(), prompts, options, config.rl.temperature))
    batch = _batch(prompts, answers, config)
    lax = {"mismatch": MismatchBounds(warn_k3=1e9, stop_k3=1e9), "updates_per_step": 1}
    trainer = Trainer(model, config.rl.model_copy(update=lax))
    figures = trainer.step(batch)
    step_s = trainer.step(batch)["trainer_s"]  # the first one warmed up
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "answer tokens": tokens,
        **{name: figures[name] for name in FIGURES},
        "engine tokens/s": tokens / seconds,
        "trainer tokens/s": tokens / step_s,
    }


async def _sample(
    handle: "EngineHandle", prompts: list[list[int]], options: NumericsOptions, temperature: float
) -> tuple[list["Generation"], float]:
    from infra.engine.client import EngineClient

    async with EngineClient(handle) as client:

        async def one(number: int, tokens: int) -> "Generation":
            return await client.generate(
                prompts[number], max_new_tokens=tokens, temperature=temperature, seed=number, ignore_eos=True
            )

        await one(0, 2)  # warms up
        started = time.monotonic()
        found = await asyncio.gather(*(one(number, options.answer_tokens) for number in range(len(prompts))))
        return found, time.monotonic() - started


def _batch(prompts: list[list[int]], answers: list["Generation"], config: RLFlowConfig) -> "TrainingBatch":
    import numpy as np

    from tasks.rl.batch import TrainingBatch, TrainingGroup

    size, groups = config.rl.group_size, []
    for first in range(0, len(prompts), size):
        chosen = answers[first : first + size]
        groups.append(
            TrainingGroup(
                np.asarray(prompts[first], dtype=np.int64),
                [np.asarray(answer.token_ids, dtype=np.int64) for answer in chosen],
                [np.asarray(answer.logprobs, dtype=np.float64) for answer in chosen],
                [float(n % 2) for n in range(len(chosen))],
            )
        )
    return TrainingBatch(groups, config.rl.temperature, max(len(answer.token_ids) for answer in answers))


def _rows(table: list[dict]) -> list[dict]:
    from tasks.evaluate import evidence

    made = []
    for line in table:
        common = {"subject": f"numerics:{line['numerics']}", "domain": line["dtype"], "n": line["answer tokens"]}
        for name, unit in FIGURES.items():
            made.append(evidence.row(f"mismatch_{name}", line[name], unit=unit, **common))
        for side in ("engine", "trainer"):
            made.append(evidence.row(f"{side}_tokens_per_second", line[f"{side} tokens/s"], unit="tokens/s", **common))
    return made


def _findings(table: list[dict]) -> list[str]:
    fast, matched = table
    speed = {side: matched[f"{side} tokens/s"] / fast[f"{side} tokens/s"] for side in ("engine", "trainer")}
    return [
        f"{fast['dtype']}: mean |D| of {fast['mean_abs']:.2g} nats with fast numerics, {matched['mean_abs']:.2g} with "
        f"matched; the engine then decodes at {speed['engine']:.0%} and the trainer steps at {speed['trainer']:.0%} of "
        f"the fast speed."
    ]


MEASUREMENT = NumericsMeasurement()
