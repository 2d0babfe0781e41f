"""Which run a flow continues: an interrupted one of the same configuration resumes, a finished one starts anew.

A run lives in `home()/runs/<key>/`: `run.json` (what it is, how it ended) and `lock`, held by the process that runs it.
The operating system drops the lock when that process ends by any means, so a dead run needs no clean-up to be resumed.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from infra.services.durations import of_target
from infra.services.home import home
from infra.services.record import write_json

RunKey = str


class Refused(Exception):
    """A gate refused the release: the run is finished, and the command ends with exit code 3."""


class Run(BaseModel):
    """One run of a flow.

    config_digest: of the flow's name, configuration and given versions, so a changed setting is another run.
    flow_run_ids: Prefect runs that worked on it, oldest first; more than one after an interruption.
    status: `open` while it runs or waits to be resumed.
    outcome: what `keep_outcome` was given, as JSON.
    """

    model_config = ConfigDict(frozen=True)

    key: RunKey
    flow: str
    target: str
    config_digest: str
    config: dict[str, Any]
    started: datetime
    flow_run_ids: list[str] = []
    status: Literal["open", "finished", "refused", "abandoned"] = "open"
    finished: datetime | None = None
    outcome: Any = None

    @property
    def folder(self) -> Path:
        """Files of this run."""
        return folder() / self.key


@contextmanager
def claim(flow: str, config: BaseModel, run: RunKey | None = None, **versions: str | None) -> Iterator[RunKey]:
    """Own the run of `flow` with `config` until the block ends, and give its key.

    run: the caller's run; given, the caller owns it and nothing is claimed (a flow called by another flow).
    versions: labels that a trigger gave the flow beside its configuration: a run about another one is another run.
    The newest open run of the same flow, configuration and versions that no live process holds is resumed, else a new
    one starts.
    A process that Prefect started for a flow run whose own one lives ends here, and changes nothing.
    The run is finished when the block ends without an exception or with `Refused`; after any other it can be resumed.
    """
    if run is not None:
        with of_target(config.target.name):
            yield run
        return
    held, lock = _claim(flow, config, versions)
    status: Literal["finished", "refused"] | None = None
    try:
        with _alive(), of_target(config.target.name):
            yield held.key
        status = "finished"
    except Refused:
        status = "refused"
        raise
    finally:
        if status:
            _write(read(held.key).model_copy(update={"status": status, "finished": datetime.now(UTC)}))
        os.close(lock)


@contextmanager
def _alive() -> Iterator[None]:
    """Around the work of a run: whether it may go on by itself, and whether it does, is told in Prefect."""
    if "prefect" not in sys.modules:
        yield
        return
    from infra.services import crashes

    crashes.give_up()
    with crashes.denied():
        yield


def keep_outcome(key: RunKey, outcome: BaseModel) -> None:
    """Keep `outcome` with the run: `lockstep report` and `status` read it."""
    _write(read(key).model_copy(update={"outcome": outcome.model_dump(mode="json")}))


def read(key: RunKey) -> Run:
    """The run with this key. Raises FileNotFoundError."""
    return Run.model_validate_json((folder() / key / "run.json").read_text())


def every(flow: str | None = None) -> list[Run]:
    """All runs (of `flow`), oldest first."""
    found = []
    for path in sorted(folder().glob("*/run.json")):
        with suppress(FileNotFoundError):  # `lockstep gc` deletes it
            found.append(read(path.parent.name))
    return sorted((r for r in found if flow in (None, r.flow)), key=lambda r: r.started)


def live(run: Run) -> bool:
    """Whether a process of this machine works on `run` now."""
    lock = _lock(run.key)
    if lock is None:
        return True
    os.close(lock)
    return False


def abandon(flow: str, config: BaseModel) -> list[RunKey]:
    """Give up the open runs of `flow` with `config` that nobody works on, so that the next one starts anew."""
    digest, given_up = config_digest(flow, config), []
    for run in every(flow):
        if run.config_digest == digest and run.status == "open" and not live(run):
            _write(run.model_copy(update={"status": "abandoned", "finished": datetime.now(UTC)}))
            given_up.append(run.key)
    return given_up


@contextmanager
def nobody_begins() -> Iterator[None]:
    """Until the block ends, no run begins or is resumed here: who wants to waits."""
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / "claims", "w") as claims:
        fcntl.flock(claims, fcntl.LOCK_EX)
        yield


def config_digest(flow: str, config: BaseModel, versions: Mapping[str, str | None] | None = None) -> str:
    """First 16 hex digits of the sha256 of the flow's name, the configuration and the given versions as canonical
    JSON, without what says how a run may be resumed."""
    given = {name: label for name, label in (versions or {}).items() if label is not None}
    settings = config.model_dump(mode="json", exclude={"rl": {"resume_under_other_pins"}})
    canonical = json.dumps([flow, settings, *([given] if given else [])], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _claim(flow: str, config: BaseModel, versions: Mapping[str, str | None]) -> tuple[Run, int]:
    digest = config_digest(flow, config, versions)
    with nobody_begins():  # one claimer at a time, so two cannot both start the same run
        for run in reversed(every(flow)):
            if run.config_digest != digest or run.status != "open":
                continue
            if (lock := _lock(run.key)) is None:
                _not_twice(run)
            else:
                return _write(
                    run.model_copy(update={"flow_run_ids": list(dict.fromkeys([*run.flow_run_ids, *_flow_run_id()]))})
                ), lock
        now = datetime.now(UTC)
        key, n = f"{flow}-{now:%Y%m%d-%H%M%S}", 1
        while (folder() / key).exists():
            n += 1
            key = f"{flow}-{now:%Y%m%d-%H%M%S}-{n}"
        (folder() / key).mkdir()
        lock = _lock(key)
        assert lock is not None
        run = Run(
            key=key,
            flow=flow,
            target=config.target.name,
            config_digest=digest,
            config=config.model_dump(mode="json"),
            started=now,
            flow_run_ids=_flow_run_id(),
        )
        return _write(run), lock


def _lock(key: RunKey) -> int | None:
    """A descriptor that holds the run's lock, or None while another process does. Not inherited by children."""
    lock = os.open(folder() / key / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _not_twice(held: Run) -> None:
    """End this process when the flow run that it was started for is one of `held`, which another process works on."""
    if not set(_flow_run_id()) & set(held.flow_run_ids):
        return
    from infra.services import crashes

    crashes.leave_to_the_other()


def _flow_run_id() -> list[str]:
    if "prefect" not in sys.modules:
        return []
    from prefect.runtime import flow_run

    return [flow_run.id] if flow_run.id else []


def _write(run: Run) -> Run:
    write_json(run.folder / "run.json", run.model_dump(mode="json"))
    return run


def folder() -> Path:
    """Where the folders of all runs are."""
    return home() / "runs"
