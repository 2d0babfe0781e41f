"""Runs that Prefect knows and that have begun and not ended, wherever they work."""

from datetime import datetime

from infra.services import environment


def flow_runs() -> list[tuple[datetime, str]]:
    """When each began, and its name; none without a Prefect server.

    Raises httpx.HTTPError when the server does not answer.
    """
    if "PREFECT_API_URL" not in environment.variables():
        return []
    environment.apply()
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType

    at_work = [StateType.RUNNING, StateType.PENDING, StateType.PAUSED, StateType.CANCELLING]
    states = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=at_work))
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(state=states))
    return [(run.start_time or run.created, run.name) for run in found if "config" in run.parameters]
