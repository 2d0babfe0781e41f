"""Passwords that are made at the first start and kept in files that only their owner may read.

They are handed on as files alone: arguments show in `ps`, and the environment of a process in what it logs.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from infra.services.home import home


def make() -> str:
    """A new password: 43 characters, 256 bits, none of which needs quoting anywhere."""
    return secrets.token_urlsafe(32)


def file(name: str, text: Callable[[], str]) -> Path:
    """The secret file `name` below `home()/secrets`, with what `text` gives when it is not there yet."""
    path = home() / "secrets" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    if not path.is_file():
        scratch = path.with_name(f".{name}.{os.getpid()}")
        scratch.unlink(missing_ok=True)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(text())
        os.replace(scratch, path)
    return path
