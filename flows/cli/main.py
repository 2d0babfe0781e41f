"""The `lockstep` command. Imports nothing heavy: commands import what they need when they run."""

import sys

import typer

from flows.cli import (
    automate,
    books,
    doctor,
    gc,
    licences,
    lineage,
    measure,
    register,
    review,
    run,
    services,
    serving,
    status,
)
from flows.cli.exits import FAILED, USAGE, Stop
from infra.config.load import ConfigError
from infra.config.plan import PlanError
from infra.lineage.versions import LineageError
from infra.services.supervise import ServiceError
from infra.serving.client import FleetError
from infra.store.base import StoreError
from infra.store.models import ModelError

CODES = {
    ConfigError: USAGE,
    ModelError: USAGE,
    ServiceError: FAILED,
    PlanError: FAILED,
    LineageError: FAILED,
    StoreError: FAILED,
    FleetError: FAILED,
}

app = typer.Typer(
    name="lockstep",
    help="Keeps a served language model, its drafter and its quantized copies in lockstep.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 a gate refused.",
)
for commands in (
    services,
    status,
    doctor,
    run,
    serving,
    books,
    lineage,
    register,
    gc,
    review,
    measure,
    automate,
    licences,
):
    commands.register(app)


def main() -> None:
    """Run the command line and exit with its code. What the user can mend is one line on stderr, never a traceback."""
    try:
        app()
    except Stop as stop:
        _say(stop)
        sys.exit(stop.code)
    except tuple(CODES) as error:
        _say(error)
        sys.exit(next(code for kind, code in CODES.items() if isinstance(error, kind)))


def _say(error: Exception) -> None:
    for line in str(error).splitlines():
        print(f"lockstep: {line}", file=sys.stderr)
