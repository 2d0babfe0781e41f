"""TRL's GRPOTrainer on rollouts recorded here, in an environment of its own."""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.evaluate.measurement import MeasureError

if TYPE_CHECKING:
    from infra.config.flows import RLFlowConfig
    from tasks.rl.batch import TrainingBatch

VERSION = "1.16.0"


def steps(
    model: Path,
    batch: "TrainingBatch",
    config: "RLFlowConfig",
    repeats: int,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, list[float] | float]:
    """Seconds of each step but the first, inputs that a step computes, and the share of them that is padding.

    Raises MeasureError when the environment cannot be made or TRL fails.
    """
    asked = {
        "model": str(model),
        "groups": [
            {"prompt": group.prompt_ids.tolist(), "answers": [answer.tolist() for answer in group.answers]}
            for group in batch.groups
        ],
        "steps": repeats + 1,
        "threads": config.cluster.trainer_threads,
        "bfloat16": config.rl.trainer_dtype == "bfloat16",
        "gradient_checkpointing": config.rl.gradient_checkpointing,
        "lr": config.rl.lr,
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("trl_steps.py")
    done = subprocess.run(
        [_environment(say), script, folder / "asked.json", folder / "found.json"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    if done.returncode:
        raise MeasureError(f"TRL {VERSION} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads((folder / "found.json").read_text())


def _environment(say: Callable[[str], None]) -> Path:
    """A Python that has TRL beside everything that is installed here."""
    from infra.services.home import home

    folder = home() / "environments" / f"trl-{VERSION}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    say(f"installing TRL {VERSION} into {folder}")
    commands = (
        [sys.executable, "-m", "venv", "--clear", folder],
        [python, "-m", "pip", "install", "--quiet", "--no-deps", f"trl=={VERSION}"],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MeasureError(f"TRL {VERSION} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "complete").touch()
    return python
