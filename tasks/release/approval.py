"""A person's word on a release, kept with the run: what was said once is not asked again."""

from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.services import runs
from infra.services.record import write_json


class Approval(BaseModel):
    """Who said what, and when. reason: why, required of who rejects."""

    model_config = ConfigDict(frozen=True)

    decision: Literal["approve", "reject"]
    name: str
    reason: str = ""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def approved(self) -> bool:
        """Whether the release may go on."""
        return self.decision == "approve"

    @property
    def text(self) -> str:
        """Such as `rejected by Ann: too slow`."""
        return f"{'approved' if self.approved else 'rejected'} by {self.name}" + (
            f": {self.reason}" * bool(self.reason)
        )


def keep_approval(run: str, approval: Approval) -> None:
    """Keep it with the run, so that an interrupted run does not ask again."""
    write_json(runs.read(run).folder / "approval.json", approval.model_dump(mode="json"))


def kept_approval(run: str) -> Approval | None:
    """What was said about this run, None when nobody was asked or nobody has answered."""
    path = runs.read(run).folder / "approval.json"
    return Approval.model_validate_json(path.read_text()) if path.is_file() else None
