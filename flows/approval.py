"""Wait until a person has approved or rejected a release."""

from typing import Literal
from uuid import uuid4

from prefect import pause_flow_run
from prefect.exceptions import FlowPauseTimeout
from prefect.input import RunInput
from pydantic import Field

from infra.services import approvals
from infra.services.progress import report
from infra.services.runs import RunKey, read
from tasks.release.approval import Approval, keep_approval, kept_approval

LOOK_EVERY_S = 2


class NotApproved(RuntimeError):
    """Nobody has decided about a release in time."""


class Word(RunInput):
    """The form on the paused run's page."""

    decision: Literal["approve", "reject"] = Field(description="Whether the release may be promoted.")
    name: str = Field(min_length=1, description="Who decides.")
    reason: str = Field("", description="Why; kept with the release.")


def ask(run: RunKey, page: str, timeout_s: float) -> Approval:
    """A person's word on the release that `page` (Markdown) describes; the flow is paused until it is given.

    What was said about this run before an interruption, or while its process was gone, counts.
    Raises NotApproved after `timeout_s` seconds; the run can then be continued, and asks again.
    """
    said = kept_approval(run)
    if said is None:
        before = approvals.given(read(run).flow_run_ids)
        word = Word.model_validate(before) if before else _wait(page, timeout_s)
        said = Approval(decision=word.decision, name=word.name, reason=word.reason)
        keep_approval(run, said)
    report(said.text)
    return said


def _wait(page: str, timeout_s: float) -> Word:
    report("waiting for a person: `lockstep approve` or `lockstep reject`, or Resume on this page")
    form = Word.with_initial_data(description=page)
    key = f"{approvals.KEY}{uuid4()}"  # of its own: a run that was killed while it waited, and is retried, waits again
    try:
        return pause_flow_run(wait_for_input=form, timeout=timeout_s, poll_interval=LOOK_EVERY_S, key=key)
    except FlowPauseTimeout:
        raise NotApproved(
            f"nobody has approved or rejected the release within {timeout_s:g} s (release.approval_timeout_s): run it "
            f"again to ask again"
        ) from None
