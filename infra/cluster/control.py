"""How a run is told from outside to use more or fewer engines: two small files in its folder, which every node sees."""

import json
import os
from pathlib import Path
from typing import Any

_WANTED, _STATE = "engines.wanted", "engines.json"


class Control:
    """folder: of the run, on a file system that the run and whoever asks share."""

    def __init__(self, folder: Path):
        self._folder = folder

    def ask(self, count: int) -> None:
        """Want `count` engines."""
        _write(self._folder / _WANTED, str(count))

    def wanted(self) -> int | None:
        """What was asked for last, by anybody."""
        path = self._folder / _WANTED
        return int(path.read_text()) if path.is_file() else None

    def tell(self, state: dict[str, Any]) -> None:
        """Say what the run has: `wanted`, `serving`, `draining`; `lines`, what has happened; `refused`, why no more
        engines are started."""
        _write(self._folder / _STATE, json.dumps(state))

    def state(self) -> dict[str, Any] | None:
        """What the run said last."""
        path = self._folder / _STATE
        return json.loads(path.read_text()) if path.is_file() else None


def _write(path: Path, text: str) -> None:
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(text)
    os.replace(scratch, path)
