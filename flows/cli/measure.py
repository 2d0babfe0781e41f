"""`lockstep measure WHAT`: one command for each measurement, its settings as options."""

import inspect
import sys
import types
from shlex import quote
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import ValidationError

from flows.cli.exits import Stop
from flows.cli.run import Files, Json, Overrides, Preset
from flows.measure import MEASUREMENTS, measure, measurement
from infra.config.base import Section
from infra.config.load import ConfigError, load

TABLE_DIGITS = 4


def register(app: typer.Typer) -> None:
    """Add the group `measure` to `app`."""
    group = typer.Typer(
        help="Measure one part of the loop on this machine; figures are kept in MLflow.", no_args_is_help=True
    )
    for what in MEASUREMENTS:
        group.command(what, help=measurement(what).help)(_command(what))
    app.add_typer(group, name="measure")


def _command(what: str):
    options = measurement(what).options

    def command(preset: Preset, config: Files, overrides: Overrides, as_json: Json, **given: Any) -> None:
        from infra.services import environment

        settings = load(measurement(what).config, preset=preset, files=config, overrides=overrides)
        chosen = _chosen(options, given)
        environment.apply()
        try:
            outcome = measure(what, settings, chosen, command=_asked(), say=lambda line: print(line, file=sys.stderr))
        except Exception as error:
            if not _ours(error):
                raise
            raise Stop(str(error)) from None
        print(outcome.model_dump_json() if as_json else _text(outcome))

    own = [_option(name, field) for name, field in options.model_fields.items()]
    common = {"preset": (Preset, None), "config": (Files, []), "overrides": (Overrides, []), "as_json": (Json, False)}
    shared = [_parameter(name, annotation, default) for name, (annotation, default) in common.items()]
    command.__signature__ = inspect.Signature([*own, *shared])
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    return command


def _option(name: str, field: Any) -> inspect.Parameter:
    """A field of the options as the command line has it: a switch, or text that pydantic reads."""
    flag = f"--{name.replace('_', '-')}"
    if field.annotation is bool:
        return _parameter(
            name, Annotated[bool, typer.Option(f"{flag}/--no-{flag[2:]}", help=field.description)], field.default
        )
    default = ",".join(map(str, field.default)) if isinstance(field.default, list | tuple) else str(field.default)
    told = f"{field.description} [default: {default or 'none'}]"
    kind = "LIST" if _is_list(field.annotation) else "VALUE"
    return _parameter(name, Annotated[str | None, typer.Option(flag, help=told, metavar=kind)], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_list(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_is_list(argument) for argument in get_args(annotation))
    return get_origin(annotation) in (list, tuple)


def _chosen(options: type[Section], given: dict[str, Any]) -> Section:
    """Raises ConfigError with a line for every option that cannot be used."""
    values = {}
    for name, value in given.items():
        if value is not None:
            listed = _is_list(options.model_fields[name].annotation)
            values[name] = [part.strip() for part in value.split(",") if part.strip()] if listed else value
    try:
        return options.model_validate(values)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            name = str(fault["loc"][0]) if fault["loc"] else ""
            where = f"--{name.replace('_', '-')} {given.get(name)}: " if name else ""
            lines.append(where + fault["msg"].removeprefix("Value error, "))
        raise ConfigError("\n".join(lines)) from None


def _ours(error: Exception) -> bool:
    """Whether a part of Lockstep raised it with a message that says what to do: one line, not a traceback."""
    return type(error).__module__.partition(".")[0] in ("infra", "tasks")


def _asked() -> str:
    return " ".join(["lockstep", *map(quote, sys.argv[1:])])


def _text(outcome: Any) -> str:
    """Table, findings and where they are kept, as plain lines."""
    lines = []
    if outcome.table:
        columns = list(outcome.table[0])
        cells = [columns] + [[_cell(row[column]) for column in columns] for row in outcome.table]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines += ["", *outcome.findings, "", f"page    {outcome.page}"]
    lines += [f"MLflow  {outcome.url}"] if outcome.url else []
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.{TABLE_DIGITS}g}" if isinstance(value, float) else str(value)
