"""What the `store` transport saves by writing only what changed: on the change of real RL steps."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from infra.config.base import Section
from infra.config.flows import RLFlowConfig
from tasks.evaluate.measurement import Measured, MeasureError

if TYPE_CHECKING:
    import torch

MB = 1e6


class DeltaOptions(Section):
    lr: list[float] = Field([1e-5, 1e-6], min_length=1, max_length=4)
    """Learning rates to train with."""
    steps: int = Field(2, ge=2, le=50)
    """RL steps of each training; the change of the last one is moved."""
    dtype: str = Field("bfloat16", pattern="^(bfloat16|float16|float32)$")
    """Type that the weights are published as."""
    repeats: int = Field(5, ge=1, le=50)
    """Times that the same change is written and read; figures are medians."""
    folder: Path | None = None
    """Where versions are written: the storage to measure. The temporary folder of this machine by default."""


class DeltaMeasurement:
    """Trains the target for a few steps at each learning rate, then moves its last change whole and as a change."""

    help = "Weight updates through a shared folder: whole versions beside only the values that a real RL step changed."
    config = RLFlowConfig
    options = DeltaOptions

    def measure(self, config: RLFlowConfig, options: DeltaOptions, say: Callable[[str], None]) -> Measured:
        """Raises MeasureError for adapters, for several ranks, and when the last step changed nothing."""
        from infra.store.models import resolve

        base, table = resolve(config.target.source), []
        for lr in options.lr:
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                say(f"lr {lr:g}: {options.steps} RL steps")
                before, after = _train(base, config, lr, options, Path(scratch) / "run")
                say(f"lr {lr:g}: moving the change of step {options.steps}")
                table.append({"lr": lr, "type": options.dtype} | _move(before, after, options, Path(scratch)))
        return Measured(_rows(table, options), table, [_finding(line) for line in table])


def _train(
    base: Path, config: RLFlowConfig, lr: float, options: DeltaOptions, workdir: Path
) -> tuple[dict[str, "torch.Tensor"], dict[str, "torch.Tensor"]]:
    """Trained weights, float32, before the last step and after it, where a trainer has them."""
    import torch
    from safetensors.torch import load_file

    from tasks.rl.run import train_policy

    if config.rl.lora is not None or config.cluster.trainer_ranks > 1:
        raise MeasureError("the change of all weights is measured: unset rl.lora, and set cluster.trainer_ranks=1")
    shorter = {
        "lr": lr,
        "lr_warmup_steps": 0,
        "steps": options.steps,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
        "eval_prompts": 1,
        "general_questions": [],
    }
    workdir.mkdir()
    train_policy(base, config.model_copy(update={"rl": config.rl.model_copy(update=shorter)}), workdir)
    found = sorted((workdir / "checkpoints").glob("step-*/weights-00000.safetensors"))
    if len(found) < 2:
        raise MeasureError(f"{len(found)} checkpoints were made by {options.steps} steps: two are compared")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before, after = load_file(found[-2], device), load_file(found[-1], device)
    if all(tensor.equal(after[name]) for name, tensor in before.items()):
        raise MeasureError(
            f"step {options.steps} changed nothing, for all answers to a prompt got one reward: take more --steps, "
            f"or raise rl.prompts_per_step"
        )
    return before, after


def _move(
    before: dict[str, "torch.Tensor"], after: dict[str, "torch.Tensor"], options: DeltaOptions, folder: Path
) -> dict[str, Any]:
    """Write and read both ways, in turns: sizes, median seconds, and the share of values that changed. One round goes
    before, to warm up."""
    import torch

    from infra.transport.base import Reach
    from infra.transport.store import StoreSender, StoreSource

    seconds: dict[str, list[float]] = {"whole": [], "change": []}
    sizes, version, dtype = {}, 0, getattr(torch, options.dtype)
    with StoreSender(options.dtype, Reach(folder=folder), whole_every=2) as sender:
        source = StoreSource(torch.device("cpu"))
        for _ in range(options.repeats + 1):
            for way, weights in (("whole", before), ("change", after)):
                version += 1
                started = time.monotonic()
                published = sender.publish(version, weights.items())
                with source.open(published) as fetch:
                    taken = {meta.name: fetch(meta) for meta in published.params}
                seconds[way].append(time.monotonic() - started)
                sizes[way] = sender.manifest.bytes
                assert all(torch.equal(taken[name], tensor.to(dtype).cpu()) for name, tensor in weights.items())
        changed = sum(shard.changed for shard in sender.manifest.shards)
    whole_s, change_s = (statistics.median(seconds[way][1:]) for way in ("whole", "change"))
    return {
        "changed": changed / sum(t.numel() for t in after.values()),
        "whole, MB": sizes["whole"] / MB,
        "change, MB": sizes["change"] / MB,
        "smaller, times": sizes["whole"] / max(1, sizes["change"]),
        "whole, s": whole_s,
        "change, s": change_s,
        "faster, times": whole_s / change_s,
    }


def _rows(table: list[dict], options: DeltaOptions) -> list[dict]:
    from tasks.evaluate.evidence import row

    figures = {
        "changed": ("delta_share_changed", "share"),
        "whole, MB": ("delta_whole_mb", "MB"),
        "change, MB": ("delta_change_mb", "MB"),
        "whole, s": ("delta_whole_s", "s"),
        "change, s": ("delta_change_s", "s"),
    }
    return [
        row(figure, line[column], n=options.repeats, unit=unit, domain=f"lr {line['lr']:g}", subject="transport:store")
        for line in table
        for column, (figure, unit) in figures.items()
    ]


def _finding(line: dict) -> str:
    return (
        f"At lr {line['lr']:g} one RL step changed {line['changed']:.2%} of the {line['type']} values: the change is "
        f"{line['smaller, times']:.0f} times smaller than the whole version ({line['change, MB']:.3g} of "
        f"{line['whole, MB']:.3g} MB), and written and read {line['faster, times']:.1f} times as fast "
        f"({line['change, s']:.3g} against {line['whole, s']:.3g} s, from trainer to engine's memory)."
    )


MEASUREMENT = DeltaMeasurement()
