"""Step checkpoints: all or nothing, and only deleted once a newer one exists."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COMMITTED = re.compile(r"step-(\d{6})")
STATE = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that does not belong to this run."""


class Checkpoints:
    """The checkpoints of one run in `folder`.

    keep: newest ones that stay. A checkpoint is a folder `step-NNNNNN` with what the trainer wrote and `state.json`; it
    is written beside and renamed, so a folder of that name is whole.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder, self._keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def latest(self) -> Path | None:
        """The newest committed checkpoint."""
        return max(self._committed(), default=None)

    def state(self, checkpoint: Path, config_digest: str) -> dict[str, Any]:
        """What `commit` was given. Raises CheckpointError when the run was configured otherwise."""
        state = json.loads((checkpoint / STATE).read_text())
        if state["config_digest"] != config_digest:
            raise CheckpointError(f"{checkpoint} was written under another configuration: start a new run")
        return state["state"]

    def commit(self, step: int, save: Callable[[Path], None], state: dict[str, Any], config_digest: str) -> Path:
        """Write the checkpoint of `step`, then delete all but the newest `keep`.

        save: writes the trainer's part into the folder it is given. state: JSON, everything else.
        """
        folder, scratch = self._folder / f"step-{step:06d}", self._folder / f"unfinished-{step:06d}"
        if folder.is_dir():
            return folder
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed run left
        scratch.mkdir()
        save(scratch)
        (scratch / STATE).write_text(json.dumps({"config_digest": config_digest, "state": state}))
        for path in sorted(scratch.rglob("*"), reverse=True):
            _flush(path)
        _flush(scratch)
        os.replace(scratch, folder)
        _flush(self._folder)
        for old in sorted(self._committed())[: -self._keep]:
            shutil.rmtree(old)
        return folder

    def _committed(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if _COMMITTED.fullmatch(path.name)]


def _flush(path: Path) -> None:
    """Make `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
