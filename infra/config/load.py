"""One configuration from a preset, TOML files and `--set` overrides; later ones win."""

import difflib
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from infra.config import confidential
from infra.config.base import Section
from infra.config.flows import FlowConfig, Settings

PRESETS = Path(__file__).parent / "presets"

Config = TypeVar("Config", bound=FlowConfig)


class ConfigError(ValueError):
    """A configuration that cannot be used. Its message has one line per fault: where, what, what to do."""


def load(
    model: type[Config], *, preset: str | None = None, files: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> Config:
    """The configuration of the flow whose model is given.

    preset: name of a file of `presets`, applied first.
    files: TOML files, applied in this order: tables merge, everything else replaces.
    overrides: `section.key=value`, applied last; the value is TOML, or a plain string when it is not.
    Every source may hold sections that only other flows read, so one file serves all flows.
    Raises ConfigError naming the source and the key of every fault.
    """
    merged: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for origin, values in _sources(preset, files, overrides):
        _merge(merged, values, origin, (), origins)
    if secrets := [_refused(path, known_by, origins) for path, known_by in confidential.find(merged)]:
        raise ConfigError("\n".join(secrets))
    known = merged.keys() - (Settings.model_fields.keys() - model.model_fields.keys())
    try:
        Settings.model_validate(merged)
        return model.model_validate({name: merged[name] for name in known})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault, merged, origins) for fault in error.errors())) from None


def presets() -> list[str]:
    """Names of the presets that ship."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def _sources(
    preset: str | None, files: Sequence[Path], overrides: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if preset is not None:
        if preset not in presets():
            raise ConfigError(f"preset {preset!r} is not known: use {' or '.join(presets())}, or --config FILE")
        yield f"preset {preset}", _read(PRESETS / f"{preset}.toml")
    for path in files:
        yield str(path), _read(path)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {override}: write it as section.key=value")
        value: Any = _value(text.strip())
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        yield f"--set {override}", value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(into: dict, values: dict, origin: str, path: tuple[str, ...], origins: dict) -> None:
    for key, value in values.items():
        here = (*path, key)
        origins[here] = origin
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value, origin, here, origins)
        else:
            into[key] = value


def _refused(path: tuple[str, ...], known_by: str, origins: dict) -> str:
    where = _origin(path, origins)
    key = where.partition("=")[0] if where.startswith("--set ") else where  # the rest of it is what must not be told
    return f"{key}: {'.'.join(path)}: {known_by}; {confidential.WHY}"


def _origin(keys: tuple[str, ...], origins: dict) -> str:
    """What set the setting `keys`, or what it is part of; "" where nothing did."""
    return next((origins[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in origins), "")


def _explain(fault: Any, merged: dict, origins: dict) -> str:
    keys = _keys(fault["loc"], merged)
    named = _origin(keys, origins)
    where = f"{named}: " if named else ""
    path = ".".join(keys)
    if fault["type"] == "extra_forbidden":
        return f"{where}unknown key {path}{_nearest(path)}"
    if fault["type"] == "missing":
        return f"{where}{path} is missing: set it"
    message = fault["msg"].removeprefix("Value error, ")
    given = f" = {fault['input']!r}" if not isinstance(fault["input"], dict | list | BaseModel) else ""
    return f"{where}{path}{given}: {message[0].lower() + message[1:]}"


def _keys(location: Sequence[str | int], merged: Any) -> tuple[str, ...]:
    """`location` as the user wrote it: pydantic adds the tag of a discriminated union, a value there and no key."""
    value, keys = merged, []
    for step in location:
        if isinstance(value, dict) and step not in value and step in value.values():
            continue
        keys.append(str(step))
        present = isinstance(value, list) if isinstance(step, int) else isinstance(value, dict) and step in value
        value = value[step] if present else None
    return tuple(keys)


def _nearest(path: str) -> str:
    known = list(_paths(Settings))
    plain = ".".join(part for part in path.split(".") if not part.isdigit())
    name = plain.rsplit(".", 1)[-1]
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == name]
    section = plain.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    close = (
        same_name
        or difflib.get_close_matches(plain, siblings, n=1, cutoff=0.7)
        or [s for s in siblings if _initials(name) == s.rsplit(".", 1)[-1]]
        or difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    )
    if close:
        return f": did you mean {' or '.join(close)}?"
    return f": known are {', '.join(s.rsplit('.', 1)[-1] for s in siblings)}" if siblings else ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings below `model`, those of the members of lists included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in _sections(field.annotation):
            yield from _paths(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) in (list, Annotated, Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _sections(argument)
