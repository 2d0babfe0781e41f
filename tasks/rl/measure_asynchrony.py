"""What sampling ahead of the trainer gains: the same training, synchronous and asynchronous, on the same devices."""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import RLFlowConfig
from infra.config.rl import RLConfig, VerifiersEnvironment
from tasks.evaluate.measurement import Line, Measured, MeasureError, Picture

if TYPE_CHECKING:
    import pandas as pd

    from tasks.rl.lengths import Lengths
    from tasks.rl.result import RLResult

SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"


class AsynchronyOptions(Section):
    steps: int = Field(16, ge=2)
    """RL steps of each training."""
    staleness: int = Field(2, ge=1)
    """rl.max_staleness of the asynchronous training."""
    answer_tokens: int = Field(512, ge=12)
    """Longest answer to sample, tokens. Lengths are lognormal: the median a twelfth of it, the 99th percentile ten
    medians. What an answer has beyond its end or rl.max_new_tokens only takes time: it is not scored or trained on."""
    colocated: bool = False
    """Let the synchronous training share all devices, so many engines and trainer ranks as there are devices, beside
    the asynchronous one with cluster.engines and cluster.trainer_ranks on pools of their own. With rl.transport=nccl
    the synchronous one takes shm."""


@dataclass(frozen=True)
class Trained:
    """One training. steps: its step table. lengths: tokens that were sampled for each answer."""

    config: RLFlowConfig
    result: "RLResult"
    steps: "pd.DataFrame"
    lengths: "Lengths"

    @property
    def seconds(self) -> float:
        """Of all its steps, filling and draining included."""
        return float(self.steps["step_s"].sum())

    def share(self, column: str) -> float:
        """Mean of a share of a step's time, over time."""
        return float((self.steps[column] * self.steps["step_s"]).sum() / self.seconds)

    def rewards(self, when: str) -> list[float]:
        """Of the held-out problems, `before` or `after` training."""
        return list(itertools.chain.from_iterable(getattr(environment, when) for environment in self.result.held_out))


class AsynchronyMeasurement:
    """Two trainings from one configuration and seed: same prompts, same lengths, same sampling seeds."""

    help = "RL steps an hour, idle time and held-out reward, synchronous beside asynchronous, with long-tailed answers."
    config = RLFlowConfig
    options = AsynchronyOptions

    def measure(self, config: RLFlowConfig, options: AsynchronyOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when answers do not fit into the engine's context, and for environments that are
        played."""
        from infra.store.models import resolve

        base = resolve(config.target.source)
        _require_room(base, config, options)
        trained = {}
        for mode, case in _cases(config, options).items():
            say(f"{mode}: {options.steps} steps")
            with tempfile.TemporaryDirectory() as folder:
                trained[mode] = _train(base, case, options, Path(folder), say)
        rows = _rows(trained, options)
        table = [_line(mode, run) for mode, run in trained.items()]
        return Measured(rows, table, _findings(trained, rows, options), _pictures(trained))


def _require_room(base: Path, config: RLFlowConfig, options: AsynchronyOptions) -> None:
    from transformers import AutoTokenizer

    from tasks.rl.environments.chat import Chat
    from tasks.rl.environments.make import make
    from tasks.rl.environments.problems import Problems

    rl = config.rl
    if any(isinstance(e, VerifiersEnvironment) for e in rl.environments):
        raise MeasureError("asynchrony is measured on prompts of reasoning_gym and jsonl environments")
    chat = Chat(AutoTokenizer.from_pretrained(base), rl.system_prompt)
    problems = Problems(rl.environments, make(rl.environments, rl.seed), rl.held_out_share, rl.seed)
    longest = max(len(chat.prompt(p.messages)) for p in problems.take(options.steps * rl.prompts_per_step))
    if longest + options.answer_tokens > config.engine.max_model_len:
        raise MeasureError(
            f"a prompt of {longest} tokens and --answer-tokens {options.answer_tokens} exceed "
            f"engine.max_model_len={config.engine.max_model_len}: raise it"
        )


def _cases(config: RLFlowConfig, options: AsynchronyOptions) -> dict[str, RLFlowConfig]:
    """The two configurations. Raises MeasureError when the synchronous one cannot have all devices."""
    from tasks.rl.placing import choose_place

    plain = {
        "steps": options.steps,
        "checkpoint_every": options.steps,
        "eval_every": 0,
        "general_questions": [],
    }
    given, cluster = config.rl.model_dump(), config.cluster
    waits = "wait" if config.rl.stragglers == "carry" else config.rl.stragglers  # there is no next version to wait for
    synchronous = RLConfig.model_validate(given | plain | {"max_staleness": 0, "stragglers": waits})
    ahead = config.model_copy(
        update={"rl": RLConfig.model_validate(given | plain | {"max_staleness": options.staleness})}
    )
    if options.colocated:
        devices = cluster.engines * config.engine.tensor_parallel + cluster.trainer_ranks
        if config.engine.tensor_parallel > 1:
            raise MeasureError("engines of several GPUs cannot share them with a trainer: leave out --colocated")
        together = cluster.model_copy(update={"placement": "colocated", "engines": devices, "trainer_ranks": devices})
        apart = cluster.model_copy(update={"placement": "disaggregated"})
        if synchronous.transport == "nccl":  # broadcasts between GPUs, not within one
            synchronous = synchronous.model_copy(update={"transport": "shm", "transport_sharded": False})
    else:  # `auto` might place the two differently
        together = apart = cluster.model_copy(update={"placement": choose_place(ahead).mode})
    return {
        SYNCHRONOUS: config.model_copy(update={"rl": synchronous, "cluster": together}),
        ASYNCHRONOUS: ahead.model_copy(update={"cluster": apart}),
    }


def _train(
    base: Path, config: RLFlowConfig, options: AsynchronyOptions, workdir: Path, say: Callable[[str], None]
) -> Trained:
    from tasks.rl.evidence import read_steps
    from tasks.rl.lengths import Lengths
    from tasks.rl.result import STEPS
    from tasks.rl.run import train_policy

    lengths = Lengths(options.answer_tokens)

    def tell(step: int, row: Mapping[str, float]) -> None:
        say(
            f"step {step} of {options.steps}: reward {row['reward_mean']:.3f}, {row['step_s']:.1f} s, idle: trainer "
            f"{row['trainer_idle_share']:.0%}, engines {row['engine_idle_share']:.0%}; "
            f"staleness {row['staleness_mean']:.1f}"
        )

    result = train_policy(base, config, workdir, on_step=tell, lengths=lengths)
    return Trained(config, result, read_steps(result.tables / STEPS), lengths)


def _line(mode: str, run: Trained) -> dict[str, Any]:
    cluster, before, after = run.config.cluster, run.rewards("before"), run.rewards("after")
    return {
        "training": mode,
        "placement": run.result.placement,
        "engines": cluster.engines,
        "ranks": cluster.trainer_ranks,
        "steps/h": 3600 * len(run.steps) / run.seconds,
        "trainer idle": run.share("trainer_idle_share"),
        "engines idle": run.share("engine_idle_share"),
        "sampled tokens/s": sum(run.lengths.drawn) / run.seconds,
        "staleness": float(run.steps["staleness_mean"].mean()),
        "mean k3": float(run.steps["k3"].mean()),
        "held out before": sum(before) / len(before),
        "held out after": sum(after) / len(after),
    }


def _rows(trained: dict[str, Trained], options: AsynchronyOptions) -> list[dict]:
    from tasks.evaluate.evidence import row
    from tasks.evaluate.paired import difference_row, mean_row

    rows = []
    for mode, run in trained.items():
        line, common = _line(mode, run), {"n": options.steps, "domain": mode, "subject": "rl"}
        rows += [
            row("asynchrony_steps_per_hour", line["steps/h"], unit="steps/h", **common),
            row("asynchrony_trainer_idle_share", line["trainer idle"], unit="share of a step", **common),
            row("asynchrony_engine_idle_share", line["engines idle"], unit="share of a step", **common),
            row("asynchrony_tokens_per_second", line["sampled tokens/s"], unit="tokens/s", **common),
            mean_row("asynchrony_reward", run.rewards("after"), unit="reward", domain=mode, subject="rl"),
        ]
    synchronous, asynchronous = (trained[mode] for mode in (SYNCHRONOUS, ASYNCHRONOUS))
    gain = synchronous.seconds / asynchronous.seconds
    rewards = synchronous.rewards("after"), asynchronous.rewards("after")
    return [
        *rows,
        row("asynchrony_speedup", gain, n=options.steps, unit="times the synchronous steps/h", subject="rl"),
        row(
            "asynchrony_tail",
            _tail(asynchronous.lengths),
            n=len(asynchronous.lengths.drawn),
            unit="p99 / p50 of tokens",
            subject="rl",
        ),
        difference_row("asynchrony_reward_difference", *rewards, unit="reward", subject="rl"),
    ]


def _tail(lengths: "Lengths") -> float:
    import numpy as np

    return float(np.quantile(lengths.drawn, 0.99) / np.median(lengths.drawn))


def _findings(trained: dict[str, Trained], rows: list[dict], options: AsynchronyOptions) -> list[str]:
    import numpy as np

    before, after = (_line(mode, trained[mode]) for mode in (SYNCHRONOUS, ASYNCHRONOUS))
    found = {row["figure"]: row for row in rows if not row["domain"]}
    gain, difference = found["asynchrony_speedup"]["value"], found["asynchrony_reward_difference"]
    drawn = trained[ASYNCHRONOUS].lengths.drawn
    equal = difference["low"] <= 0 <= difference["high"]
    return [
        f"With max_staleness={options.staleness} an hour takes {after['steps/h']:.0f} steps, synchronous "
        f"{before['steps/h']:.0f}: {gain:.2f} times as many. Each sampled {len(drawn)} answers, half of them to "
        f"{np.median(drawn):.0f} tokens, the 99th percentile to {found['asynchrony_tail']['value']:.1f} times that.",
        f"The trainer was idle {before['trainer idle']:.0%} of the synchronous time and {after['trainer idle']:.0%} of "
        f"the asynchronous, the engines {before['engines idle']:.0%} and {after['engines idle']:.0%}.",
        f"Held-out reward {before['held out before']:.3f} became {before['held out after']:.3f} synchronous and "
        f"{after['held out after']:.3f} asynchronous: a difference of {difference['value']:+.3f} "
        f"({difference['low']:+.3f} to {difference['high']:+.3f}, n={difference['n']}), "
        f"{'none' if equal else 'one'} that this sample can tell.",
    ]


def _pictures(trained: dict[str, Trained]) -> list[Picture]:
    def curve(mode: str, run: Trained) -> Line:
        minutes = run.steps["step_s"].cumsum() / 60
        return Line(mode, list(zip(minutes, run.steps["reward_mean"], strict=True)))

    reward = [curve(mode, run) for mode, run in trained.items()]
    seconds = [Line(mode, list(zip(r.steps["step"], r.steps["step_s"], strict=True))) for mode, r in trained.items()]
    return [
        Picture("Reward by time", "minutes of steps", "mean reward of a step", reward),
        Picture("Seconds of each step", "step", "seconds", seconds),
    ]


MEASUREMENT = AsynchronyMeasurement()
