"""`lockstep lineage`: which versions there are, what each was made from, and whether they fit together."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.books import Json, newest_target
from flows.cli.exits import FAILED, USAGE, Stop
from infra.services import environment


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(lineage)


def lineage(
    version: Annotated[str | None, typer.Argument(help="NAME or NAME/VERSION; the newest run's target.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Re-hash every artifact and prove every link.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write one page with a picture.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Show the target's versions with their drafters, quants and releases, or prove that they fit together."""
    environment.apply()
    from infra.lineage.lineage import Lineage
    from infra.lineage.tree import render, tree

    if html is not None and html.is_dir():
        raise Stop(f"--html {html} is a folder: name a file in it", code=USAGE)
    book = Lineage()
    name, _, number = (version or newest_target()).partition("/")
    found = tree(book, name)
    if number:
        found = found.model_copy(update={"targets": [n for n in found.targets if str(n.version.version) == number]})
        if not found.targets:
            raise Stop(f"{name} has no version {number}: `lockstep lineage {name}` lists what there is")
    problems = _check(book, found, number) if check else None
    if html is not None:
        _page(html, found, problems)
    if problems is not None:
        _tell(problems, version or name, as_json)
    elif html is None:
        print(found.model_dump_json() if as_json else render(found))
    if html is not None and not as_json:
        print(f"page: {html.absolute()}")
    if problems:
        raise Stop(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the lineage of {name}", code=FAILED)


def _check(book, found, number: str):
    from infra.lineage.check import check
    from infra.store.open import open_store

    only = [v.label for node in found.targets for v in node.versions] if number else None
    return check(book, open_store(), found.name, only=only)


def _page(file: Path, found, problems) -> None:
    from infra.store.open import open_store
    from tasks.report.lineage import build, measurements

    build(file, found, measurements(open_store(), found), problems)


def _tell(problems, what: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps([problem.model_dump() for problem in problems]))
    else:
        whole = f"{what}: every artifact is whole, no broken link, nothing deployed lacks evidence"
        print("\n".join(f"{p.version}: {p.what}" for p in problems) or whole)
