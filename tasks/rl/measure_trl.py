"""TRL's GRPOTrainer on rollouts recorded here, in a process and a folder of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from infra.services.home import home
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

    Raises MeasureError when it cannot be installed or fails.
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # on several, it would be run on each of them
    done = subprocess.run(
        [sys.executable, script, folder / "asked.json", folder / "found.json"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(_packages(say)),
            "CUDA_VISIBLE_DEVICES": visible,
            "TRL_EXPERIMENTAL_SILENCE": "1",
        },
    )
    if done.returncode:
        raise MeasureError(f"TRL {VERSION} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads((folder / "found.json").read_text())


def _packages(say: Callable[[str], None]) -> list[str]:
    """Folders of TRL and of everything that is installed here, so that both trainers have the same torch."""
    here = [path for path in sys.path if any(Path(path).glob("*.dist-info"))]
    with suppress(PackageNotFoundError):
        if version("trl") == VERSION:
            return here
    folder = home() / "environments" / f"trl-{VERSION}"
    if not (folder / "complete").exists():
        say(f"installing TRL {VERSION} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            folder,
            f"trl=={VERSION}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MeasureError(f"TRL {VERSION} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        (folder / "complete").touch()
    return [str(folder), *here]
