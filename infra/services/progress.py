"""What runs now: one line in Prefect's log, a progress artifact in its UI, and the live line of the CLI."""

import logging
import time
from uuid import UUID

import httpx

ARTIFACT_EVERY_S = 1.0

_artifacts: dict[str, tuple[UUID, str, float]] = {}  # task or flow run -> artifact, last text, time of the last update
_logger = logging.getLogger(__name__)


def report(text: str, done: float | None = None, of: float | None = None) -> None:
    """Say what the current task (or flow) does; `done` of `of` says how far it is, in any unit.

    Call it as often as there is news: a new text is logged, the progress artifact is updated at most once a second.
    Outside a Prefect run it logs only. A Prefect server that does not answer costs a warning, never the work.
    """
    from prefect.context import FlowRunContext, TaskRunContext
    from prefect.exceptions import PrefectException
    from prefect.logging import get_run_logger

    context = TaskRunContext.get() or FlowRunContext.get()
    if context is None:
        _logger.info("%s%s", text, _share(done, of))
        return
    task_run_id = context.task_run.id if isinstance(context, TaskRunContext) else None
    flow_run_id = context.task_run.flow_run_id if isinstance(context, TaskRunContext) else context.flow_run.id
    owner = str(task_run_id or flow_run_id)
    artifact, last_text, last_time = _artifacts.get(owner, (None, None, 0.0))
    if text != last_text:
        get_run_logger().info(text + _share(done, of))
    elif time.monotonic() - last_time < ARTIFACT_EVERY_S and done != of:
        return
    try:
        artifact = _show(artifact, text, done, of, task_run_id, flow_run_id)
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("progress could not be shown in Prefect: %s", error)
    if artifact is not None:
        _artifacts[owner] = (artifact, text, time.monotonic())


def _show(artifact: UUID | None, text: str, done, of, task_run_id, flow_run_id) -> UUID:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

    percent = round(100.0 * done / of, 1) if done is not None and of else 0.0
    description = text + _share(done, of)
    client = get_client(sync_client=True)
    if artifact is None:
        wanted = ArtifactCreate(
            type="progress", description=description, data=percent, task_run_id=task_run_id, flow_run_id=flow_run_id
        )
        return client.create_artifact(wanted).id
    client.update_artifact(artifact, ArtifactUpdate(description=description, data=percent))
    return artifact


def _share(done: float | None, of: float | None) -> str:
    if done is None:
        return ""
    return f" ({done:g}/{of:g})" if of is not None else f" ({done:g})"
