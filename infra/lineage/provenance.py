"""What every registered version says about where it comes from: code, libraries, engine, configuration."""

import hashlib
import json
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

LIBRARIES = ("torch", "transformers", "compressed-tensors", "speculators", "mlflow", "ray")


def provenance(config: BaseModel | None = None) -> dict[str, str]:
    """Tags `lockstep.git`, `.engine`, `.libraries` and, with a config, `.config_digest` and `.config` (JSON)."""
    tags = dict(_surroundings())
    if config is not None:
        tags["lockstep.config"] = config.model_dump_json()
        tags["lockstep.config_digest"] = config_digest(config)
    return tags


def config_digest(config: BaseModel) -> str:
    """`sha256:` of the configuration as JSON with sorted keys."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@cache
def _surroundings() -> tuple[tuple[str, str], ...]:
    from infra.engine.pin import engine_pin

    pins = {}
    for library in LIBRARIES:
        try:
            pins[library] = version(library)
        except PackageNotFoundError:
            continue  # speculators and others may be left out of an installation that does not train
    return (
        ("lockstep.git", _git_revision()),
        ("lockstep.engine", engine_pin()),
        ("lockstep.libraries", json.dumps(pins, sort_keys=True)),
    )


def _git_revision() -> str:
    root = Path(__file__).resolve().parents[2]
    if shutil.which("git") is None:
        return "unknown (git is not installed)"
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown (not a git checkout)"
    changed = subprocess.run(
        ["git", "-C", root, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
    )
    return head.stdout.strip() + (" with local changes" if changed.stdout.strip() else "")
