"""What runs now: one line in Prefect's log, a progress artifact in its UI, and the live line of the CLI."""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

ARTIFACT_EVERY_S = 1.0

_told: dict[str, tuple[str, float]] = {}  # task or flow run -> last text, time of the last update
_logger = logging.getLogger(__name__)


def report(text: str, done: float | None = None, of: float | None = None) -> None:
    """Say what the current task (or flow) does; `done` of `of` says how far it is, in any unit.

    Call it as often as there is news: a new text is logged, the progress artifact is updated at most once a second, by
    another thread, so that the work does not wait for Prefect. Outside a Prefect run it logs only. A Prefect server
    that does not answer costs a warning, never the work.
    """
    from prefect.context import FlowRunContext, TaskRunContext
    from prefect.logging import get_run_logger

    context = TaskRunContext.get() or FlowRunContext.get()
    if context is None:
        _logger.info("%s%s", text, _share(done, of))
        return
    task_run_id = context.task_run.id if isinstance(context, TaskRunContext) else None
    flow_run_id = context.task_run.flow_run_id if isinstance(context, TaskRunContext) else context.flow_run.id
    owner, now = str(task_run_id or flow_run_id), time.monotonic()
    last_text, last_time = _told.get(owner, (None, 0.0))
    if text != last_text:
        get_run_logger().info(text + _share(done, of))
    elif now - last_time < ARTIFACT_EVERY_S and done != of:
        return
    _told[owner] = text, now
    percent = round(100.0 * done / of, 1) if done is not None and of else 0.0
    _board().put(owner, _Line(text + _share(done, of), percent, task_run_id, flow_run_id, get_run_logger()))


@dataclass(frozen=True)
class _Line:
    text: str
    percent: float
    task_run_id: UUID | None
    flow_run_id: UUID | None
    logger: Any


class _Board:
    """Prefect's progress artifacts, kept up to date by a thread of its own, which ends with the process and then has
    shown all. A line that another of its owner follows before its turn comes is not shown."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._lock = threading.Lock()
        self._waiting: dict[str, _Line] = {}
        self._artifacts: dict[str, UUID] = {}

    def put(self, owner: str, line: _Line) -> None:
        with self._lock:
            waits_already = owner in self._waiting
            self._waiting[owner] = line
        if not waits_already:
            self._thread.submit(self._show, owner)

    def _show(self, owner: str) -> None:
        with self._lock:
            line = self._waiting.pop(owner)
        try:
            self._renew(owner, line)
        except Exception as error:  # nobody waits for this thread: whatever it is costs a warning
            line.logger.warning("progress could not be shown in Prefect: %s", error)

    def _renew(self, owner: str, line: _Line) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with get_client(sync_client=True) as client:
            if owner in self._artifacts:
                shown = ArtifactUpdate(description=line.text, data=line.percent)
                client.update_artifact(self._artifacts[owner], shown)
                return
            runs = {"task_run_id": line.task_run_id, "flow_run_id": line.flow_run_id}
            shown = ArtifactCreate(type="progress", description=line.text, data=line.percent, **runs)
            self._artifacts[owner] = client.create_artifact(shown).id


_board = cache(_Board)
os.register_at_fork(after_in_child=_board.cache_clear)  # threads stay behind


def _share(done: float | None, of: float | None) -> str:
    if done is None:
        return ""
    return f" ({done:g}/{of:g})" if of is not None else f" ({done:g})"
