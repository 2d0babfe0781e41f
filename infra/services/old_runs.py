"""Folders of runs that ended a while ago, with checkpoints and pages that nobody comes back to, and their deletion."""

import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import BaseModel

from infra.services import runs


class OldRun(BaseModel):
    """A run whose folder may be deleted. ended: how and when, as people read it; bytes: of its files."""

    key: str
    ended: str
    bytes: int


def find(grace: timedelta) -> list[OldRun]:
    """Runs that ended longer than `grace` ago, oldest first, and what an interrupted deletion left.

    One that is at work or can be resumed is never among them, nor the last of each flow of each target, nor the last of
    those with an outcome: `report`, `status`, `review` and the plan of the next run go by them.
    """
    with runs.nobody_begins():
        every, left = runs.every(), _left()
    before = datetime.now(UTC) - grace
    last = {(run.flow, run.target): run.key for run in every}
    told = {(run.flow, run.target): run.key for run in every if run.outcome is not None}
    kept = {*last.values(), *told.values()}
    found = [
        OldRun(key=run.key, ended=f"{run.status} {run.finished:%Y-%m-%d}", bytes=_bytes(run.folder))
        for run in every
        if run.status != "open" and run.finished and run.finished < before and run.key not in kept
    ]
    return found + [OldRun(key=folder.name, ended="deleted in part", bytes=_bytes(folder)) for folder in left]


def delete(found: Sequence[OldRun]) -> Iterator[tuple[OldRun, bool]]:
    """Delete their folders; each, and whether it is gone. Who still works in one keeps it. No run begins meanwhile."""
    with runs.nobody_begins():
        left = {folder.name for folder in _left()}
        here = {run.key: run for run in runs.every()}
        for old in found:
            run = here.get(old.key)
            if run is not None and (run.status == "open" or runs.live(run)):
                yield old, False
            elif run is not None or old.key in left:
                folder = runs.folder() / old.key
                (folder / "run.json").unlink(missing_ok=True)  # first: half of a run is none
                shutil.rmtree(folder)
                yield old, True
            else:  # another one deletes too
                yield old, True


def _left() -> list[Path]:
    """Folders that are no run's, while `nobody_begins`: outside of it a run has its file."""
    return [path for path in sorted(runs.folder().iterdir()) if path.is_dir() and not (path / "run.json").is_file()]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
