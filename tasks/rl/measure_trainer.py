"""How fast the trainer trains on recorded rollouts, beside another trainer on the same ones."""

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import RLFlowConfig
from tasks.evaluate.measurement import Measured

if TYPE_CHECKING:
    from tasks.rl.batch import TrainingBatch

SPREAD = 0.894
"""Standard deviation of the logarithm of long-tailed lengths: the 99th percentile is eight medians."""


class TrainerOptions(Section):
    groups: int = Field(2, ge=1)
    """Prompts, each with `rl.group_size` answers."""
    prompt_tokens: int = Field(64, ge=1)
    """Tokens of a prompt."""
    answer_tokens: int = Field(36, ge=2)
    """Mean tokens of an answer."""
    repeats: int = Field(2, ge=1, le=20)
    """Steps of each set of rollouts; figures are their medians. One more goes before, to warm up."""
    trl: bool = False
    """Train on the same rollouts with TRL's GRPOTrainer too; it is installed into a folder of its own on first use."""


class TrainerMeasurement:
    """Speed depends on lengths alone: tokens are random, lengths are the quantiles of their distribution."""

    help = "The trainer's tokens/s on long-tailed and on uniform answers, and TRL's GRPOTrainer on the same ones."
    config = RLFlowConfig
    options = TrainerOptions

    def measure(self, config: RLFlowConfig, options: TrainerOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError when TRL cannot be installed or fails."""
        from infra.store.models import resolve
        from tasks.rl import measure_trl

        model, table = resolve(config.target.source), []
        for lengths in ("long-tailed", "uniform"):
            batch = recorded(model, config.rl.group_size, options, long_tailed=lengths == "long-tailed")
            say(f"{lengths}: {options.repeats + 1} steps on {batch.num_answers} answers")
            ours = _steps(model, config, batch, options.repeats)
            table.append(_line(lengths, "lockstep", batch, ours))
            say(f"{lengths}: {table[-1]['answer tokens/s']:.0f} answer tokens/s")
            if options.trl:
                say(f"{lengths}: the same steps by TRL {measure_trl.VERSION}")
                with tempfile.TemporaryDirectory() as folder:
                    theirs = measure_trl.steps(model, batch, config, options.repeats, Path(folder), say)
                table.append(_line(lengths, "trl", batch, theirs))
                say(f"{lengths}: {table[-1]['answer tokens/s']:.0f} answer tokens/s by TRL")
        return Measured(_rows(table, options), table, _findings(table))


def recorded(model: Path, group_size: int, options: TrainerOptions, *, long_tailed: bool) -> "TrainingBatch":
    """Groups of random tokens. The long-tailed lengths are lognormal, the uniform ones all as long as their mean."""
    import numpy as np

    from tasks.rl.batch import TrainingBatch, TrainingGroup

    random = np.random.default_rng(0)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    count = options.groups * group_size
    normal = statistics.NormalDist(0, SPREAD)
    shape = np.exp([normal.inv_cdf((n + 0.5) / count) for n in range(count)]) if long_tailed else np.ones(count)
    lengths = random.permutation(np.maximum(2, np.rint(shape / shape.mean() * options.answer_tokens)).astype(int))
    groups = []
    for own in np.split(lengths, options.groups):
        answers = [random.integers(0, vocabulary, n) for n in own]
        groups.append(
            TrainingGroup(
                random.integers(0, vocabulary, options.prompt_tokens),
                answers,
                [np.full(len(answer), -np.log(vocabulary)) for answer in answers],
                random.standard_normal(group_size).tolist(),
            )
        )
    return TrainingBatch(groups, temperature=1.0, longest=int(lengths.max()))


def _steps(model: Path, config: RLFlowConfig, batch: "TrainingBatch", repeats: int) -> dict[str, list[float] | float]:
    """Seconds of each step but the first, and inputs that a step computes."""
    import torch

    from infra.config.rl import MismatchBounds
    from tasks.rl.trainer import Trainer

    torch.set_num_threads(config.cluster.trainer_threads)
    # random tokens are nothing that the model would have sampled
    lax = {"mismatch": MismatchBounds(warn_k3=1e9, stop_k3=1e9), "correction": "none", "updates_per_step": 1}
    trainer = Trainer(model, config.rl.model_copy(update=lax))
    figures = [trainer.step(batch) for _ in range(repeats + 1)]
    return {"seconds": [f["trainer_s"] for f in figures[1:]], "inputs": figures[0]["trainer_tokens"], "padding": 0.0}


def _line(lengths: str, trainer: str, batch: "TrainingBatch", found: dict) -> dict[str, str | float | int | None]:
    seconds = statistics.median(found["seconds"])
    answers = [len(answer) for group in batch.groups for answer in group.answers]
    return {
        "lengths": lengths,
        "trainer": trainer,
        "answers": len(answers),
        "answer tokens": sum(answers),
        "longest": max(answers),
        "step, s": seconds,
        "answer tokens/s": sum(answers) / seconds,
        "inputs computed": int(found["inputs"]),
        "padding share": found["padding"],
        "inputs/s": found["inputs"] / seconds,
    }


def _rows(table: list[dict], options: TrainerOptions) -> list[dict]:
    from tasks.evaluate import evidence

    made = []
    for line in table:
        common = {"n": options.repeats, "subject": f"trainer:{line['trainer']}", "domain": line["lengths"]}
        made.append(evidence.row("trainer_tokens_per_second", line["answer tokens/s"], unit="tokens/s", **common))
        made.append(evidence.row("trainer_inputs", float(line["inputs computed"]), unit="tokens", **common))
        made.append(evidence.row("trainer_padding_share", line["padding share"], unit="share", **common))
    return made


def _findings(table: list[dict]) -> list[str]:
    found = []
    for ours in (line for line in table if line["trainer"] == "lockstep"):
        speed = f"{ours['lengths']}: {ours['answer tokens/s']:.0f} answer tokens/s without padding"
        theirs = next((t for t in table if t["lengths"] == ours["lengths"] and t["trainer"] == "trl"), None)
        if theirs is None:
            found.append(f"{speed}.")
            continue
        ratio = ours["answer tokens/s"] / theirs["answer tokens/s"]
        inputs = theirs["inputs computed"] / ours["inputs computed"]
        found.append(
            f"{speed}, {ratio:.2f} times TRL's {theirs['answer tokens/s']:.0f}: TRL computes {inputs:.2f} times the "
            f"inputs ({theirs['padding share']:.0%} of them padding, the prompt once for every answer), each at "
            f"{inputs / ratio:.0%} of the speed here."
        )
    return found


MEASUREMENT = TrainerMeasurement()
