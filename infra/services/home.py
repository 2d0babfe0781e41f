"""Where Lockstep keeps what it makes on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """`LOCKSTEP_HOME`, or `.lockstep` beside the source (Lockstep is installed editable)."""
    return Path(os.environ.get("LOCKSTEP_HOME") or Path(__file__).resolve().parents[2] / ".lockstep").absolute()
