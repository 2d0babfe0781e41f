"""The licence of every package that Lockstep stands on, as the packages themselves state it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

UNKNOWN = "not stated"
LOOK = re.compile(r"(?i)GPL|EULA|End User|proprietary|not stated|Dual|Artistic|MPL|Mozilla")
"""Licences that somebody should read: copyleft, of one vendor, or unclear."""
LONG = 80  # what is longer is the licence's text, not its name


@dataclass(frozen=True)
class Licence:
    """package, version; licence: SPDX expression or name; home: where the package says it comes from; file: its licence
    text in the environment, "" where it ships none."""

    package: str
    version: str
    licence: str
    home: str
    file: str


def licences(unpacked: Sequence[Path] = (), root: str = "lockstep") -> list[Licence]:
    """Of all installed packages that `root` needs, directly or through others, by name; `root` itself is left out.

    unpacked: folders of packages that were fetched for their data (models, questions), not installed.
    Raises PackageNotFoundError when `root` is not installed.
    """
    found = {_key(d): d for folder in unpacked for d in distributions(path=[str(folder)])}
    found |= {_key(d): d for d in _needed(distribution(root), set())}
    found.pop(_normal(root), None)
    return [_licence(found[name]) for name in sorted(found)]


def _needed(package: Distribution, seen: set[str]) -> Iterator[Distribution]:
    seen.add(_key(package))
    yield package
    for line in package.requires or []:
        requirement = Requirement(line)
        if _normal(requirement.name) in seen:
            continue
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # an extra that is not installed, or for another platform
        yield from _needed(found, seen)


def _licence(package: Distribution) -> Licence:
    about = package.metadata
    classified = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    stated = (about.get("License") or "").strip()
    named = stated if stated and len(stated) <= LONG and "\n" not in stated else ""
    file = next((str(p.locate()) for p in package.files or [] if re.match(r"(?i)(licen[cs]e|copying)", p.name)), "")
    urls = dict(line.split(", ", 1) for line in about.get_all("Project-URL") or [] if ", " in line)
    home = about.get("Home-page") or next((url for name, url in urls.items() if _IS_HOME.match(name)), "")
    licence = about.get("License-Expression") or named or ", ".join(classified) or _titled(file) or UNKNOWN
    return Licence(package=about["Name"], version=package.version, licence=licence, home=home, file=file)


_IS_HOME = re.compile(r"(?i)home|source|repository|github|code")
_TITLES = (
    ("Apache License", "Apache-2.0"),
    ("MIT License", "MIT"),
    ("Permission is hereby granted, free of charge", "MIT"),
    ("BSD 3-Clause", "BSD-3-Clause"),
    ("Redistribution and use in source and binary forms", "BSD"),
    ("NVIDIA", "NVIDIA proprietary"),
)


def _titled(file: str) -> str:
    """The licence that a text begins with; "" for one that is not known."""
    if not file:
        return ""
    with open(file, errors="replace") as text:
        beginning = " ".join(text.read(2000).split())
    return next((f"{name} (by its text)" for title, name in _TITLES if title in beginning), "")


def _key(package: Distribution) -> str:
    return _normal(package.metadata["Name"])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
