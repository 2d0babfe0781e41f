"""What the files of a folder hold that services write to while it is read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file below `folder` but links, and what is in it; what goes meanwhile is passed over."""
    for here, _, names in os.walk(folder):
        for path in (Path(here, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    yield path, path.read_bytes()
