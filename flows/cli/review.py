"""`lockstep review`: the questions of a design review, answered about one release."""

from typing import Annotated

import typer

from flows.cli.books import newest_target
from flows.cli.run import FLOWS, Files, Json, Local, Overrides, Preset, Request, run_flow
from infra.config.load import load

NAME = "review"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(NAME, help=FLOWS[NAME][1])(review)


def review(
    release: Annotated[
        str | None, typer.Argument(help="A number, an alias, or NAME-release/NUMBER; the champion if not given.")
    ] = None,
    preset: Preset = None,
    config: Files = [],  # noqa: B006  (typer copies it)
    overrides: Overrides = [],  # noqa: B006
    local: Local = False,
    as_json: Json = False,
) -> None:
    asked = list(overrides)
    if release is not None:
        name, _, number = release.rpartition("-release/")
        asked += [f"review.release={number}", *([f"target.name={name}"] if name else [])]
    if not (preset or config or any(one.startswith("target.name=") for one in asked)):
        asked.append(f"target.name={newest_target()}")
    settings = load(FLOWS[NAME][0], preset=preset, files=config, overrides=asked)
    run_flow(Request(NAME, preset, config, asked, local), settings, new=False, as_json=as_json)
