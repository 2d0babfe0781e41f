"""The trainer's part of a checkpoint, and the policy as a model folder.

Every rank writes what it holds; a checkpoint may be loaded by another number of ranks.
"""

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from infra.cluster.ranks import spread
from tasks.rl.trainer import Trainer

REST = "trainer.json"


@dataclass(frozen=True)
class Snapshot:
    """What one rank holds at one moment, in memory of the host: weights that are trained (adapters, where there are),
    moments, random state, and where the learning rate is."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    scheduler: int
    rank: int
    world: int


def snapshot(trainer: Trainer) -> Snapshot:
    """A copy of the state as it is now, which training on does not change."""
    named = trainer.policy.trained()
    moments = {
        f"{name}/{key}": _copy(value)
        for name, p in named.items()
        for key, value in trainer.optimizer.state.get(p, {}).items()
    }
    return Snapshot(
        {name: _copy(p) for name, p in named.items()},
        moments | {"rng": torch.get_rng_state()},
        trainer.scheduler.last_epoch,
        trainer.ranks.rank,
        trainer.ranks.world,
    )


def write(state: Snapshot, folder: Path) -> None:
    """Write a rank's snapshot into `folder`, such that `load` restores every bit."""
    save_file(state.weights, folder / _name("weights", state.rank))
    save_file(state.optimizer, folder / _name("optimizer", state.rank))
    if state.rank == 0:
        (folder / REST).write_text(json.dumps({"scheduler": state.scheduler, "ranks": state.world}))


def load(trainer: Trainer, folder: Path) -> None:
    """Restore what the ranks wrote. Raises ValueError when it is another model's."""
    named, rest = trainer.policy.trained(), json.loads((folder / REST).read_text())
    with ExitStack() as stack:
        weights, moments = (
            [stack.enter_context(safe_open(folder / _name(kind, n), "pt")) for n in range(rest["ranks"])]
            for kind in ("weights", "optimizer")
        )
        if differing := named.keys() ^ set(weights[0].keys()):
            raise ValueError(f"{folder} is a checkpoint of another model: {sorted(differing)[:3]} differ")
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(spread(_joined(weights, name), p))
        torch.set_rng_state(moments[min(trainer.ranks.rank, rest["ranks"] - 1)].get_tensor("rng"))
        trainer.optimizer.state.clear()
        for name in set(moments[0].keys()) - {"rng"}:
            parameter, key = name.rsplit("/", 1)
            p, number = named[parameter], key == "step"
            value = moments[0].get_tensor(name).to(p.device) if number else spread(_joined(moments, name), p)
            trainer.optimizer.state[p][key] = value
    trainer.scheduler.last_epoch = rest["scheduler"]
    for group, rate in zip(trainer.optimizer.param_groups, trainer.scheduler.get_lr(), strict=True):
        group["lr"] = rate
    trainer.scheduler._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]


def export(trainer: Trainer, base: Path, folder: Path) -> None:
    """Write the policy into the new `folder` as a Hugging Face model, with the tokenizer and other files of `base`.

    Every rank takes part; the first one writes."""
    weights = {}
    for name, weight in trainer.named_weights():
        if trainer.ranks.rank == 0:
            weights[name] = weight.cpu()
    if trainer.ranks.rank > 0:
        return
    trainer.policy.causal.save_pretrained(folder, state_dict=weights)
    for path in base.iterdir():
        stored = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and not stored and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


def _copy(value: torch.Tensor) -> torch.Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().to("cpu", copy=True).contiguous()


def _joined(files: list, name: str) -> torch.Tensor:
    """FSDP2 shards along the first dimension, in the order of ranks."""
    parts = [file.get_tensor(name) for file in files]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
