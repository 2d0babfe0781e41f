"""The list of licences: every locked package that is installed is on it, and what a lawyer looks for is told."""

import csv
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

from packaging.requirements import Requirement

from infra.locks.licences import LOOK, UNKNOWN, licences

LOCKSTEP = Path(sys.executable).with_name("lockstep")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_that_is_needed_here_is_listed_with_its_licence(tmp_path):
    listed = {normal(one.package): one for one in licences()}
    for line in requires("lockstep"):
        requirement = Requirement(line)
        try:
            distribution(requirement.name)
        except PackageNotFoundError:
            continue
        assert normal(requirement.name) in listed, line
    assert len(listed) > 100 and "lockstep" not in listed
    assert listed["pydantic"].licence == "MIT" and Path(listed["pydantic"].file).is_file()
    assert listed["torch"].version == distribution("torch").version
    assert sum(one.licence == UNKNOWN for one in listed.values()) < 5


def test_a_package_that_was_unpacked_for_its_data_is_listed_too(tmp_path):
    about = tmp_path / "prompts==1" / "prompts-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: prompts\nVersion: 1\nLicense: GPL-3.0\n")
    (found,) = [one for one in licences([about.parent]) if one.package == "prompts"]
    assert (found.version, found.licence) == ("1", "GPL-3.0")
    assert LOOK.search(found.licence) and not LOOK.search("Apache-2.0")


def test_the_command_prints_a_table_and_names_what_must_be_read():
    done = subprocess.run([LOCKSTEP, "licences"], capture_output=True, text=True)
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert done.returncode == 0, done.stderr
    assert {row["package"].lower() for row in rows} >= {"torch", "prefect", "mlflow", "ray"}
    assert re.search(r"\d+ packages; to be read: .*psycopg \(LGPL-3.0-only\)", done.stderr)
