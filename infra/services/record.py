"""What `lockstep up` writes down of each process it starts, so that `lockstep down` ends exactly that."""

import json
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.services.home import home


class ServiceError(RuntimeError):
    """A service could not be started, reached or stopped."""


class Record(BaseModel):
    """One started service.

    pid, started: the process and its start time in seconds since the epoch; together they survive reuse of the pid.
    token: value of LOCKSTEP_SERVICE in the environment of the process and of everything it started.
    port, address: where it listens; 0 and "" for a service that listens nowhere.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    pid: int
    started: float
    token: str
    port: int = 0
    address: str = ""
    log: Path

    @staticmethod
    def path(name: str) -> Path:
        return home() / "services" / f"{name}.json"

    @classmethod
    def read(cls, name: str) -> "Record | None":
        """The record of service `name`, or None where none was started."""
        try:
            return cls.model_validate_json(cls.path(name).read_text())
        except FileNotFoundError:
            return None

    @classmethod
    def all(cls) -> "list[Record]":
        """Records of every started service, by name."""
        return [cls.model_validate_json(p.read_text()) for p in sorted((home() / "services").glob("*.json"))]

    def write(self) -> None:
        """Replace the record on disk in one step."""
        write_json(self.path(self.name), self.model_dump(mode="json"))

    def forget(self) -> None:
        """Remove the record."""
        self.path(self.name).unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON so that readers see the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=1))
    os.replace(scratch, path)
