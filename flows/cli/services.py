"""Commands that start, stop and examine the services of this machine."""

import sys
from typing import Annotated

import typer

from infra.services import local, profile
from infra.services.record import Record

Port = Annotated[int | None, typer.Option(help="Its port; without it the usual one, or the next free one.")]

Services = Annotated[
    profile.Profile | None,
    typer.Option("--profile", help="local: SQLite and folders; team: PostgreSQL and S3. Kept until another is named."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(up)
    app.command()(down)


def up(services: Services = None, prefect_port: Port = None, mlflow_port: Port = None) -> None:
    """Start Prefect's server and worker, MLflow, and what the profile has beside them; what runs already stays."""
    for record in local.up(_say, services, prefect_port=prefect_port, mlflow_port=mlflow_port):
        print(f"{record.name:<9} {record.address or f'pid {record.pid}'}")


def down() -> None:
    """Stop what `lockstep up` started, and nothing else."""
    if not Record.all():
        _say("nothing to stop: no service was started here")
    local.down(_say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
