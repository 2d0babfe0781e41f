"""The command that reads what a run came to, and what the other commands share."""

import json
from typing import Annotated

import typer

from flows.cli.exits import Stop
from infra.services import runs

Name = Annotated[str | None, typer.Option("--name", help="Target's name; that of the newest run if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(report)


def report(
    run: Annotated[str | None, typer.Argument(help="Key of the run; the last finished loop if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a loop came to, and where its report is."""
    if run is not None:
        try:
            found = runs.read(run)
        except FileNotFoundError:
            raise Stop(f"there is no run {run} here: `lockstep status` names the last one") from None
    else:
        loops = [r for r in runs.every("loop") if r.outcome is not None]
        if not loops:
            raise Stop("no loop has finished here yet: `lockstep loop` runs one")
        found = loops[-1]
    if found.outcome is None:
        raise Stop(f"{found.key} has not finished: `lockstep status` shows what runs")
    from flows.cli.outcomes import text

    print(json.dumps(found.outcome) if as_json else text(found))


def newest_target() -> str:
    """Name of the newest run's target. Raises Stop where nothing has run."""
    every = runs.every()
    if not every:
        raise Stop("nothing has run here yet: name the target")
    return every[-1].target
