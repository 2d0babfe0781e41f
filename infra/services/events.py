"""Events in Prefect, which start runs: see the triggers in `prefect.yaml`."""

from collections.abc import Mapping
from uuid import NAMESPACE_URL, UUID, uuid5

from infra.services import environment

environment.apply()

from prefect.client.orchestration import get_client  # noqa: E402  (Prefect reads its settings on import)
from prefect.events.schemas.events import Event, RelatedResource  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402

from infra.services.patience import patiently  # noqa: E402


def emit(event: str, key: str, resource: Mapping[str, str], payload: Mapping[str, str | float | bool | None]) -> UUID:
    """Give the event to the Prefect server; it has it when this returns. Its id is given.

    key: what the event is about, once: the same event and key emitted again, after an interruption, has the same id,
    and the server acts on an id once.
    resource: `prefect.resource.id` and further labels, which triggers match.
    Raises httpx.HTTPError when the server cannot be told.
    """
    about = Event(
        id=uuid5(NAMESPACE_URL, f"{event}#{key}"), event=event, resource=dict(resource), payload=dict(payload)
    )
    if flow_run.id:
        by = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.role": "flow-run"}
        about.related.append(RelatedResource(by))

    def post() -> None:
        with get_client(sync_client=True) as client:
            client.request("POST", "/events", json=[about.model_dump(mode="json")])

    patiently(post)
    return about.id
