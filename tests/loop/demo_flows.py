"""A flow that calls another, of two phases, which a test can hold, kill and make fail."""

import os
from pathlib import Path

from demo_config import DemoConfig
from prefect import flow
from pydantic import BaseModel

from flows.approval import ask
from infra.services.prefect import durable
from infra.services.progress import report
from infra.services.runs import Refused, claim, keep_outcome


class Made(BaseModel):
    what: str
    where: Path


@durable(name="make first")
def make_first(run: str, folder: Path) -> Made:
    with open(folder / "first.calls", "a") as calls:
        calls.write(f"{run}\n")
    return Made(what="first", where=folder)


@durable(name="make second")
def make_second(run: str, made: Made) -> list[Made]:
    report("at the gate", 1, 2)
    gate = made.where / "gate"
    (made.where / "second.pid").write_text(str(os.getpid()))
    if gate.exists():
        gate.read_text()
    return [made, Made(what="second", where=made.where)]


@flow(name="demo-phase")
def phase(config: DemoConfig, run: str) -> list[Made]:
    return make_second(run, make_first(run, Path(config.folder)))


@flow(name="demo")
def demo(config: DemoConfig, run: str | None = None) -> Made:
    with claim("demo", config, run) as key:
        parts = phase(config, run=key)
        if (parts[0].where / "ask").exists():
            said = ask(key, "# Shall it be?", timeout_s=600)
            (parts[0].where / "said").write_text(said.text)
        made = Made(what=", ".join(part.what for part in parts), where=parts[0].where)
        keep_outcome(key, made)
        if (made.where / "refuse").exists():
            raise Refused("acceptance 1.1 is below 1.3")
        if (made.where / "fail").exists():
            raise ValueError("the disk is full:\nfree some")
        return made
