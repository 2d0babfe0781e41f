"""The trainer's part of a checkpoint, and the policy as a model folder."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tasks.rl.trainer import Trainer

WEIGHTS, OPTIMIZER, REST = "weights.safetensors", "optimizer.safetensors", "trainer.json"


def save(trainer: Trainer, folder: Path) -> None:
    """Write weights, optimizer, scheduler and random state into `folder`, such that `load` restores every bit."""
    named = dict(trainer.model.named_parameters())
    save_file({name: p.detach().contiguous() for name, p in named.items()}, folder / WEIGHTS)
    moments = {
        f"{name}/{key}": value for name, p in named.items() for key, value in trainer.optimizer.state.get(p, {}).items()
    }
    save_file(moments | {"rng": torch.get_rng_state()}, folder / OPTIMIZER)
    (folder / REST).write_text(json.dumps({"scheduler": trainer.scheduler.last_epoch}))


def load(trainer: Trainer, folder: Path) -> None:
    """Restore what `save` wrote. Raises ValueError when it is another model's."""
    named, weights = dict(trainer.model.named_parameters()), load_file(folder / WEIGHTS)
    if named.keys() != weights.keys():
        raise ValueError(
            f"{folder} is a checkpoint of another model: {sorted(named.keys() ^ weights.keys())[:3]} differ"
        )
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(weights[name])
    moments = load_file(folder / OPTIMIZER)
    torch.set_rng_state(moments.pop("rng"))
    trainer.optimizer.state.clear()
    for name, value in moments.items():
        parameter, key = name.rsplit("/", 1)
        on = "cpu" if key == "step" and trainer.device.type == "cpu" else trainer.device
        trainer.optimizer.state[named[parameter]][key] = value.to(on)
    rest = json.loads((folder / REST).read_text())
    trainer.scheduler.last_epoch = rest["scheduler"]
    for group, rate in zip(trainer.optimizer.param_groups, trainer.scheduler.get_lr(), strict=True):
        group["lr"] = rate
    trainer.scheduler._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]


def export(trainer: Trainer, base: Path, folder: Path) -> None:
    """Write the policy into the new `folder` as a Hugging Face model, with the tokenizer and other files of `base`."""
    trainer.model.save_pretrained(folder)
    for path in base.iterdir():
        weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and not weights and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
