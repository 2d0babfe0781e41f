"""Step checkpoints: all or nothing, written beside training, and only deleted once a newer one exists."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from infra.store.disk import sync

_COMMITTED = re.compile(r"step-(\d{6})")
STATE = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that does not belong to this run, or that could not be written."""


class Checkpoints:
    """The checkpoints of one run in `folder`.

    keep: newest ones that stay. A checkpoint is a folder `step-NNNNNN` with what the trainer wrote and `state.json`; it
    is written beside and renamed, so a folder of that name is whole.
    config_digest: of the run's configuration. pins: what engine and trainer compute with, by name; any_pins: a
    checkpoint may have been written under others.
    As a context it waits at its end for what is being written.
    """

    def __init__(
        self, folder: Path, keep: int, config_digest: str, pins: Mapping[str, str], *, any_pins: bool = False
    ) -> None:
        self._folder, self._keep, self._digest = folder, keep, config_digest
        self._pins, self._any_pins = dict(pins), any_pins
        self._writing: asyncio.Task[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    async def __aenter__(self) -> "Checkpoints":
        return self

    async def __aexit__(self, kind: type | None, *error: object) -> None:
        if kind is None:
            await self.written()
        elif self._writing:
            await asyncio.gather(self._writing, return_exceptions=True)

    def latest(self) -> Path | None:
        """The newest committed checkpoint."""
        return max(self._committed(), default=None)

    def state(self, checkpoint: Path) -> tuple[dict[str, Any], list[str]]:
        """What `commit` was given, and which pins were others, each in words.

        Raises CheckpointError when the run was configured otherwise, or when pins differ that must not.
        """
        kept = json.loads((checkpoint / STATE).read_text())
        if kept["config_digest"] != self._digest:
            raise CheckpointError(f"{checkpoint} was written under another configuration: start a new run")
        names = sorted(kept["pins"].keys() | self._pins.keys())
        pairs = {name: (kept["pins"].get(name, "none"), self._pins.get(name, "none")) for name in names}
        changed = [f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if old != new]
        if changed and not self._any_pins:
            raise CheckpointError(
                f"{checkpoint} was written under other pins ({'; '.join(changed)}), so the run would not end where an "
                f"unbroken one ends: restore them, or allow it with rl.resume_under_other_pins=true"
            )
        return kept["state"], changed

    async def commit(
        self,
        step: int,
        write: Callable[[Path], Awaitable[None]],
        state: dict[str, Any],
        *,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to write the checkpoint of `step`, once the one before is committed; then all but the newest `keep` are
        deleted.

        write: writes the trainer's part into the folder it is given. state: JSON, everything else. then: called once it
        is committed.
        Raises CheckpointError when the one before could not be written.
        """
        await self.written()
        text = json.dumps({"config_digest": self._digest, "pins": self._pins, "state": state})
        self._writing = asyncio.ensure_future(self._commit(step, write, text, then))

    def check(self) -> None:
        """Raises CheckpointError when writing has failed meanwhile."""
        if self._writing and self._writing.done():
            self._writing.result()

    async def written(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError when it could not be."""
        if self._writing:
            await self._writing
            self._writing = None

    async def _commit(
        self, step: int, write: Callable[[Path], Awaitable[None]], state: str, then: Callable[[], None]
    ) -> None:
        folder, scratch = self._folder / f"step-{step:06d}", self._folder / f"unfinished-{step:06d}"
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # what a killed run left
            scratch.mkdir()
            await write(scratch)
            await asyncio.to_thread(self._rename, scratch, folder, state)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {error}; the last good one is {self.latest()}"
            ) from error
        then()

    def _rename(self, scratch: Path, folder: Path, state: str) -> None:
        (scratch / STATE).write_text(state)
        for path in sorted(scratch.rglob("*"), reverse=True):
            sync(path)
        sync(scratch)
        os.replace(scratch, folder)
        sync(self._folder)
        for old in sorted(self._committed())[: -self._keep]:
            shutil.rmtree(old)

    def _committed(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if _COMMITTED.fullmatch(path.name)]
