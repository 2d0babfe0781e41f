"""What runs by itself here: the settings that triggers and schedules use, and which of them are on."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from infra.services.home import home
from infra.services.record import write_json


class Standing(BaseModel):
    """What `lockstep automate` was told.

    target: name of the target whose events start runs. configs: configuration by flow, as JSON. folder: what relative
    paths in them mean. schedules: `flow/slug` of those that are on. resume: whether a crashed run is continued by
    itself.
    """

    model_config = ConfigDict(frozen=True)

    target: str
    configs: dict[str, dict[str, Any]]
    folder: Path
    schedules: list[str] = []
    resume: bool = False

    @staticmethod
    def path() -> Path:
        return home() / "services" / "standing" / "standing.json"

    @classmethod
    def read(cls) -> "Standing | None":
        """What was told last, or None where nothing runs by itself."""
        try:
            return cls.model_validate(json.loads(cls.path().read_text()))
        except FileNotFoundError:
            return None

    def write(self) -> None:
        """Replace what was told before."""
        write_json(self.path(), self.model_dump(mode="json"))

    @classmethod
    def forget(cls) -> None:
        """Nothing runs by itself any more."""
        cls.path().unlink(missing_ok=True)
