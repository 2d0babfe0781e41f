"""Files that are whole or not there."""

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path


def place(source: Path, stage: Path, paths: Sequence[str]) -> None:
    """Files of `source` in `stage`, read-only: hard links where the disk allows it."""
    for path in paths:
        target = stage / path
        target.parent.mkdir(parents=True, exist_ok=True)
        real = (source / path).resolve()
        try:
            os.link(real, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            shutil.copyfile(real, target)
        os.chmod(target, 0o444)


def write(path: Path, text: str, *, durably: bool = True) -> None:
    """Replace `path` as a whole. durably: wait until it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            if durably:
                os.fsync(fd)
        os.chmod(scratch, 0o444)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
    if durably:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def boot_id() -> str:
    """Another one each time the machine is started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
