"""`lockstep gc`: delete artifacts that nothing refers to, and the folders of runs that ended long ago."""

import json
from datetime import timedelta
from typing import Annotated

import typer

from flows.cli.books import Json
from flows.cli.exits import FAILED, Stop
from infra.services import environment

MIB = 2**20


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(gc)


def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Delete; without it they are only listed.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Also hidden states and other data that no released version was made from.")
    ] = False,
    grace_days: Annotated[float, typer.Option(help="What is younger stays, days.", min=0)] = 7.0,
    as_json: Json = False,
) -> None:
    """List the artifacts that no version names and the folders of old runs, or delete them. What a run that is not
    finished may want stays, and so does the last run of each flow of each target."""
    environment.apply()
    import httpx

    from infra.lineage import garbage
    from infra.lineage.lineage import Lineage
    from infra.services import old_runs
    from infra.store.open import open_store

    book, store = Lineage(), open_store()
    try:
        found = garbage.find(book, store, timedelta(days=grace_days), data=data)
        gone = list(garbage.delete(book, store, found, data=data)) if delete else []
        old = old_runs.find(timedelta(days=grace_days))
        ended = [run.key for run, is_gone in old_runs.delete(old) if is_gone] if delete else []
    except httpx.HTTPError as error:
        raise Stop(f"the Prefect server does not say which runs are at work ({error}): `lockstep up`", FAILED) from None
    deleted = [ref for ref, is_gone in gone if is_gone]
    if as_json:
        folders = {"runs": [run.model_dump(mode="json") for run in old], "deleted_runs": ended}
        print(json.dumps(found.model_dump(mode="json") | {"deleted": [ref.name for ref in deleted]} | folders))
        return
    for ref in found.artifacts:
        stayed = " stays: it was wanted meanwhile" if delete and ref not in deleted else ""
        print(f"{ref.bytes / MIB:>10,.1f} MiB  {ref.name}{stayed}")
    for run in old:
        stayed = " stays: somebody works on it" if delete and run.key not in ended else ""
        print(f"{run.bytes / MIB:>10,.1f} MiB  runs/{run.key}, {run.ended}{stayed}")
    print(f"kept: {found.kept} artifacts, {found.kept_bytes / MIB:,.1f} MiB; {found.because}")
    freed = sum(run.bytes for run in old)
    what = f"{len(found.artifacts)} artifacts, {found.bytes / MIB:,.1f} MiB"
    folders = f"folders of {len(old)} runs, {freed / MIB:,.1f} MiB"
    if delete:
        print(f"deleted: {len(deleted)} of {what}; {folders}, {len(ended)} of them")
    else:
        print(f"to delete: {what}; {folders}" + ("; `lockstep gc --delete` does it" if found.artifacts or old else ""))
