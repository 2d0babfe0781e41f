"""Automations in the Prefect server: what happens to runs that end badly, and who is told."""

import os
from datetime import timedelta
from typing import Any
from uuid import UUID

from infra.services import environment

environment.apply()

from prefect.automations import Automation, EventTrigger, Posture  # noqa: E402  (Prefect reads settings on import)
from prefect.blocks.webhook import Webhook  # noqa: E402
from prefect.client.orchestration import get_client  # noqa: E402
from prefect.client.schemas.objects import StateType  # noqa: E402
from prefect.events.actions import ActionTypes, CallWebhook, ChangeFlowRunState, SendNotification  # noqa: E402
from prefect.events.schemas.automations import AutomationCore  # noqa: E402
from prefect.exceptions import ObjectNotFound  # noqa: E402

MARK_SILENT = "lockstep: mark silent runs crashed"
RESUME = "lockstep: continue crashed runs"
TELL_OF_RUNS, TELL_OF_EVENTS = "lockstep: tell of runs that ended badly", "lockstep: tell of drift and refusals"
SILENT_S = 90  # three heartbeats
RESUMED = "continued by itself after a crash"  # message of the state that the automation sets

NOTIFY_URL, NOTIFY_BLOCK = "LOCKSTEP_NOTIFY_URL", "LOCKSTEP_NOTIFY_BLOCK"
BAD_ENDS = {"prefect.flow-run.Crashed", "prefect.flow-run.Failed"}
BAD_NEWS = {"lockstep.drafter.drifted", "lockstep.release.refused"}
# what a person reads, as Prefect fills it in; PAGE is the server's address
RUNS = (
    "{{ event.resource.name }}: {{ event.resource['prefect.state-name'] }}",
    "{{ event.resource['prefect.state-message'] }}\n\nPAGE/runs/flow-run/{{ event.resource.id.split('.')[-1] }}",
)
NEWS = (
    "{{ event.resource.name }}: {{ event.event }}",
    "{% for name, value in event.payload.items() %}{{ name }}: {{ value }}\n{% endfor %}",
)
OURS = {"prefect.resource.id": ["prefect.tag.lockstep"], "prefect.resource.role": "tag"}  # runs of deployments


def mark_silent() -> None:
    """A run that sent heartbeats and has fallen silent is marked crashed."""
    terminal = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    _keep(
        Automation(
            name=MARK_SILENT,
            description=f"A run that sent heartbeats and has been silent for {SILENT_S} s has lost its process.",
            trigger=EventTrigger(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.heartbeat", *terminal},
                match={"prefect.resource.id": ["prefect.flow-run.*"]},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=SILENT_S),
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: its process is gone")],
        )
    )


def resume_crashed(on: bool) -> None:
    """Whether a crashed run of a deployment is continued by itself, as by a click on Retry. `crashes.give_up` ends what
    crashes again and again."""
    _keep(
        Automation(
            name=RESUME,
            description="A run whose process died goes on where it was. `lockstep automate --resume` switches it on.",
            enabled=on,
            trigger=EventTrigger(
                expect={"prefect.flow-run.Crashed"},
                match={"prefect.resource.id": ["prefect.flow-run.*"]},
                match_related=OURS,
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(0),
            ),
            actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message=RESUMED, force=True)],
        )
    )


def notify() -> str:
    """Tell somebody when a run fails or crashes, a drafter drifts or a release is refused: by the Prefect notification
    block that LOCKSTEP_NOTIFY_BLOCK names (`slack-webhook/ops`), or by a JSON POST to LOCKSTEP_NOTIFY_URL, which
    Prefect keeps as a secret. Nothing changes where neither is set. Says by which; never the URL.

    Raises ValueError when the block does not exist.
    """
    if not (os.environ.get(NOTIFY_BLOCK) or os.environ.get(NOTIFY_URL)):
        return ""
    for name, expected, related, words in ((TELL_OF_RUNS, BAD_ENDS, OURS, RUNS), (TELL_OF_EVENTS, BAD_NEWS, {}, NEWS)):
        trigger = EventTrigger(
            expect=expected, match_related=related, posture=Posture.Reactive, threshold=1, within=timedelta(0)
        )
        _keep(Automation(name=name, trigger=trigger, actions=[_told(*words)]))
    return os.environ.get(NOTIFY_BLOCK) or f"the address in {NOTIFY_URL}"


def tell_nobody() -> None:
    """Nobody is told any more."""
    with get_client(sync_client=True) as client:
        for name in (TELL_OF_RUNS, TELL_OF_EVENTS):
            for automation in client.read_automations_by_name(name):
                client.delete_automation(automation.id)


def _told(subject: str, body: str) -> ActionTypes:
    if named := os.environ.get(NOTIFY_BLOCK):
        kind, _, name = named.partition("/")
        with get_client(sync_client=True) as client:
            page = str(client.api_url).removesuffix("/").removesuffix("/api")
            try:
                block = client.read_block_document_by_name(name, kind)
            except ObjectNotFound:
                raise ValueError(
                    f"{NOTIFY_BLOCK}={named}: this Prefect server has no such block, make it there"
                ) from None
        return SendNotification(block_document_id=block.id, subject=subject, body=body.replace("PAGE", page))
    block_id = Webhook(url=os.environ[NOTIFY_URL]).save("lockstep-notify", overwrite=True)
    payload = (
        '{"event": "{{ event.event }}", "about": "{{ event.resource.name }}", "payload": {{ event.payload | tojson }}}'
    )
    return CallWebhook(block_document_id=UUID(str(block_id)), payload=payload)


def _keep(wanted: Automation) -> None:
    """Make the automation, or make the one of that name what is wanted. One that already is stays untouched: with an
    update the server forgets what it was waiting for, such as the next heartbeat of a run that has lost its process."""
    with get_client(sync_client=True) as client:
        for same in client.read_automations_by_name(wanted.name):
            if _said(same) != _said(wanted):
                client.update_automation(same.id, wanted)
            return
    wanted.create()


def _said(automation: AutomationCore) -> dict[str, Any]:
    """What the automation says, without the ids that the server gave its parts."""
    return automation.model_dump(
        include={"name", "description", "enabled", "trigger", "actions"}, exclude={"trigger": {"id"}}
    )
