"""`lockstep licences`: under which terms the packages come that Lockstep stands on."""

import csv
import sys

import typer

from infra.locks import licences as locks
from infra.services.home import home


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(licences)


def licences() -> None:
    """List the licence of every package, as CSV; those that somebody should read are named on stderr."""
    found = locks.licences(sorted((home() / "packages").glob("*")))
    table = csv.writer(sys.stdout)
    table.writerow(["package", "version", "licence", "home page", "licence text"])
    table.writerows([one.package, one.version, one.licence, one.home, one.file] for one in found)
    read = [f"{one.package} ({one.licence})" for one in found if locks.LOOK.search(one.licence)]
    print(f"{len(found)} packages; to be read: {', '.join(read) or 'none'}", file=sys.stderr)
