"""Versions, links, aliases, runs and checks, in a real MLflow database."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from infra.config.target import TargetConfig
from infra.lineage.aliases import aliases, nominate, promote, roll_back
from infra.lineage.check import Problem, check
from infra.lineage.client import connect
from infra.lineage.lineage import Lineage
from infra.lineage.source import base_version
from infra.lineage.tree import render, tree
from infra.lineage.versions import ADOPTED, LINK, LineageError, Version
from infra.services.runs import Refused
from infra.store.local import LocalStore
from infra.store.models import ModelError
from infra.store.refs import ArtifactRef


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> Lineage:
    return Lineage(f"sqlite:///{tmp_path_factory.mktemp('book') / 'mlflow.db'}")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    return LocalStore(tmp_path_factory.mktemp("store"))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A target of its own for each test."""
    return request.node.originalname.replace("_", "-").replace("test-", "")


class Maker:
    """Registers versions of one target with artifacts of their own."""

    def __init__(self, lineage: Lineage, store: LocalStore, name: str, folder: Path):
        self.lineage, self.store, self.name, self.folder = lineage, store, name, folder
        self.made = 0

    def artifact(self, kind: str, table: pd.DataFrame | None = None, inputs: Sequence[ArtifactRef] = ()) -> ArtifactRef:
        self.made += 1
        folder = self.folder / str(self.made)
        folder.mkdir()
        if table is None:
            (folder / "weights").write_text(f"{self.name} {kind} {self.made}")
        else:
            table.to_parquet(folder / "evidence.parquet")
        return self.store.put(folder, kind, producer="a test", inputs=inputs)

    def measured(self, version: Version, target: Version | None = None) -> Version:
        """With evidence of a measurement of it, on `target`."""
        table = pd.DataFrame({"figure": ["f"], "subject": [version.subject], "value": [float(self.made)]})
        inputs = [version.artifact, *([target.artifact] if target else [])]
        return self.lineage.attach_evidence(version, self.artifact("evidence", table, inputs))

    def target(self, parent: Version | None = None) -> Version:
        return self.measured(self.lineage.register_target(self.name, self.artifact("target"), parent=parent, run_id=""))

    def drafter(self, target: Version) -> Version:
        drafter = self.lineage.register_drafter(self.name, self.artifact("drafter"), target=target, run_id="")
        return self.measured(drafter, target)

    def quant(self, target: Version) -> Version:
        quant = self.lineage.register_quant(self.name, self.artifact("quant"), target=target, run_id="")
        return self.measured(quant, target)

    def release(self, target: Version, drafter: Version | None = None, quant: Version | None = None) -> Version:
        parts = [v for v in (target, drafter, quant) if v]
        table = pd.DataFrame({"figure": ["f"] * len(parts), "subject": [v.subject for v in parts], "value": 1.0})
        record = self.artifact("release", table)
        return self.lineage.register_release(self.name, record, target=target, drafter=drafter, quant=quant, run_id="")


@pytest.fixture
def make(lineage: Lineage, store: LocalStore, name: str, tmp_path: Path) -> Maker:
    return Maker(lineage, store, name, tmp_path)


def test_registering_again_returns_the_same_version(lineage: Lineage, make: Maker, name: str):
    first = make.target()
    artifact, config = make.artifact("target"), TargetConfig(name=name)
    second, again = (
        lineage.register_target(name, artifact, parent=first, run_id="r1", config=config) for _ in range(2)
    )
    other_run = lineage.register_target(name, artifact, parent=first, run_id="r2")
    assert (second.label, again.label, other_run.label) == (f"{name}/2", f"{name}/2", f"{name}/3")
    assert second.parent == first.label
    assert second.tags["lockstep.config_digest"].startswith("sha256:")
    assert json.loads(second.tags["lockstep.config"])["name"] == name
    assert {"lockstep.git", "lockstep.engine", "lockstep.libraries"} <= second.tags.keys()
    assert lineage.get(first.label).links.keys() == {second.label, other_run.label}


def test_links_are_written_both_ways(lineage: Lineage, make: Maker, name: str):
    target = make.target()
    drafter, quant = make.drafter(target), make.quant(target)
    release = make.release(target, drafter, quant)
    assert lineage.get(target.label).links == {v.label: v.artifact.digest for v in (drafter, quant, release)}
    assert lineage.get(drafter.label).links == {release.label: release.artifact.digest}
    assert release.parts == {"target": target.label, "drafter": drafter.label, "quant": quant.label}
    assert target.artifact in drafter.inputs
    assert (drafter.subject, drafter.label) == (f"drafter:{name}/1", f"{name}-drafter/1")
    assert [v.label for v in lineage.drafters(target)] == [drafter.label]
    assert lineage.quants(make.target(target)) == []
    assert check(lineage, make.store, name) == []


def test_evidence_is_attached_once_and_in_order(lineage: Lineage, make: Maker):
    target = make.target()
    (first,) = target.evidence
    target = make.measured(target)
    assert lineage.attach_evidence(target, first) == target
    assert target.evidence[0] == first
    assert len(target.evidence) == 2


def test_aliases_move_the_triple(lineage: Lineage, make: Maker, name: str):
    one = make.target()
    drafter = make.drafter(one)
    two = make.target(one)
    releases = [make.release(one, drafter), make.release(two), make.release(two, quant=make.quant(two))]
    assert lineage.resolve(name, "champion") is None
    with pytest.raises(LineageError, match="nothing .* has been released"):
        roll_back(lineage, name)
    nominate(lineage, releases[0])
    assert lineage.resolve(f"{name}-drafter", "candidate") == lineage.get(drafter.label)
    promote(lineage, releases[0])
    assert aliases(lineage, name) == {"champion": releases[0].label}
    with pytest.raises(LineageError, match="first release"):
        roll_back(lineage, name)
    for release in releases[1:]:
        promote(lineage, release)
        promote(lineage, release)  # as after an interruption
    assert aliases(lineage, name) == {"champion": releases[2].label, "previous": releases[1].label}
    assert lineage.resolve(name, "champion").label == two.label
    assert lineage.resolve(f"{name}-drafter", "champion") is None
    now, before = roll_back(lineage, name)
    assert (now.label, before.label) == (releases[1].label, releases[2].label)
    now, before = roll_back(lineage, name)
    assert (now.label, before.label) == (releases[0].label, releases[1].label)
    assert lineage.resolve(f"{name}-drafter", "champion").label == drafter.label
    assert aliases(lineage, name) == {"champion": releases[0].label}


def test_resolve(lineage: Lineage, make: Maker, name: str):
    assert lineage.resolve(name, "latest") is None
    one = make.target()
    two = make.target(one)
    assert lineage.resolve(name, "latest") == two
    assert lineage.resolve(name, 1).label == lineage.resolve(name, "1").label == one.label
    assert lineage.resolve(name, 3) is None
    assert lineage.resolve(f"{name}-quant", "latest") is None
    with pytest.raises(LineageError, match="'newest' is not a version"):
        lineage.resolve(name, "newest")
    with pytest.raises(LineageError, match=f"there is no {name}/9"):
        lineage.get(f"{name}/9")
    with pytest.raises(LineageError, match="write MODEL/NUMBER"):
        lineage.get(name)


def test_the_source_becomes_version_1(lineage: Lineage, make: Maker, name: str, tiny_llama: Path, tmp_path: Path):
    target = TargetConfig(name=name, source=str(tiny_llama))
    with pytest.raises(LineageError, match="target.base_version=previous"):
        base_version(lineage, make.store, target.model_copy(update={"base_version": "previous"}))
    with pytest.raises(ModelError):
        base_version(lineage, make.store, target.model_copy(update={"source": str(tmp_path)}))
    assert lineage.resolve(name, "latest") is None
    one = base_version(lineage, make.store, target)
    assert one == base_version(lineage, make.store, target)
    assert (make.store.open(one.artifact) / "config.json").is_file()
    two = make.target(one)
    assert base_version(lineage, make.store, target).label == two.label
    promote(lineage, make.release(one))
    assert base_version(lineage, make.store, target).label == one.label


def test_a_version_that_lockstep_did_not_register(lineage: Lineage, name: str):
    lineage.client.create_registered_model(name)
    lineage.client.create_model_version(name, "s3://somewhere/model")
    with pytest.raises(LineageError, match="lacks the tags .* give the target another name"):
        lineage.resolve(name, "latest")


def test_check_finds_every_kind_of_damage(lineage: Lineage, make: Maker, name: str):
    target, other = make.target(), make.target()
    drafter, quant = make.drafter(target), make.quant(other)
    release = make.release(target, drafter)
    wrong = make.release(target, quant=quant)
    client = lineage.client
    client.delete_model_version_tag(name, "1", LINK + drafter.label)
    client.set_model_version_tag(name, "1", LINK + f"{name}-quant/9", "sha256:0")
    client.set_model_version_tag(drafter.model, "1", LINK + release.label, "sha256:0")
    weights = make.store.open(quant.artifact) / "weights"
    weights.chmod(0o644)
    weights.write_text("other weights")
    found = [(p.version, p.what) for p in check(lineage, make.store, name)]
    expected = [
        (drafter.label, f"names {target.label}, which does not name it back"),
        (target.label, f"is named by {name}-quant/9, which is not registered"),
        (drafter.label, f"is named by {release.label} with digest sha256:0, but"),
        (wrong.label, f"serves {target.label} with {quant.label}, which was made for {other.label}"),
        (quant.label, f"artifact {quant.artifact.name} in {make.store.root} is damaged: weights has 13 bytes of other"),
    ]
    assert len(found) == len(expected)
    for label, start in expected:
        assert any(version == label and what.startswith(start) for version, what in found), (label, start, found)
    assert check(lineage, make.store, name, only=[other.label]) == []
    assert check(lineage, make.store, name, only=["x/1"]) == [Problem(version="x/1", what="is not registered")]


def test_a_release_without_evidence_of_a_part_is_found(lineage: Lineage, make: Maker, name: str):
    target = make.target()
    drafter = make.drafter(target)
    about_target = pd.DataFrame({"figure": ["f"], "subject": [target.subject], "value": [1.0]})
    record = make.artifact("release", about_target)
    release = lineage.register_release(name, record, target=target, drafter=drafter, quant=None, run_id="")
    assert check(lineage, make.store, name) == [
        Problem(version=release.label, what=f"serves {drafter.label} without evidence of it")
    ]


def test_a_drafter_or_quant_that_was_not_measured_on_its_target_is_found(lineage: Lineage, make: Maker, name: str):
    target, other = make.target(), make.target()
    elsewhere = lineage.register_drafter(name, make.artifact("drafter"), target=target, run_id="")
    make.measured(elsewhere, other)
    never = lineage.register_quant(name, make.artifact("quant"), target=target, run_id="")
    adopted = lineage.register_quant(name, make.artifact("quant"), target=target, run_id="", tags={ADOPTED: "models/q"})
    assert adopted.unproven and not never.unproven
    continued = "continue or repeat the run that made it"
    assert check(lineage, make.store, name) == [
        Problem(
            version=elsewhere.label, what=f"points to {target.label}, but none of its evidence was measured on that"
        ),
        Problem(version=never.label, what=f"points to {target.label} without having been measured on it: {continued}"),
    ]
    make.measured(elsewhere, target)
    make.measured(never, target)
    assert check(lineage, make.store, name) == []


@pytest.mark.parametrize("alias", ["candidate", "champion", "previous"])
def test_nothing_deployed_lacks_evidence(lineage: Lineage, make: Maker, name: str, alias: str):
    name = make.name = f"{name}-{alias}"
    target = make.target()
    drafter = lineage.register_drafter(name, make.artifact("drafter"), target=target, run_id="", tags={ADOPTED: "d"})
    release = make.release(target, drafter)
    assert check(lineage, make.store, name) == []
    lineage.client.set_registered_model_alias(release.model, alias, str(release.version))
    fault = f"is {alias} and serves {drafter.label}, which has no evidence"
    assert check(lineage, make.store, name) == [Problem(version=release.label, what=fault)]
    make.measured(drafter, target)
    assert check(lineage, make.store, name) == []


def test_evidence_without_its_table_is_found(lineage: Lineage, make: Maker, name: str):
    target = make.target()
    release = lineage.register_release(
        name, make.artifact("release"), target=target, drafter=None, quant=None, run_id=""
    )
    found = [problem.what for problem in check(lineage, make.store, name)]
    assert found[0].startswith("has an evidence artifact without a table")
    assert found[1:] == [f"serves {target.label} without evidence of it"]
    assert release.evidence == [release.artifact]


def test_tree(lineage: Lineage, make: Maker, name: str):
    one = make.target()
    two = make.target(one)
    drafter = make.drafter(two)
    promote(lineage, make.release(two, drafter))
    found = tree(lineage, name)
    assert [n.version.label for n in found.targets] == [one.label, two.label]
    assert [v.label for v in found.targets[1].drafters] == [drafter.label]
    lines = render(found).splitlines()
    assert lines[0] == f"{name}: 2 versions"
    assert any(f"release {name}-release/1" in line and line.endswith("<- champion") for line in lines)
    assert any(line.endswith(f"serves {two.label}, {drafter.label}") for line in lines)
    assert any(line.endswith(f"from {one.label}") for line in lines)
    with pytest.raises(LineageError, match="no version of nothing"):
        tree(lineage, "nothing")


def test_runs_nest_and_resume(lineage: Lineage, tmp_path: Path):
    with (
        lineage.run("loop-1", "loop", model="smol") as top,
        pytest.raises(RuntimeError, match="dies"),
        lineage.run("loop-1", "rl", tags={"target_version": "smol/2"}) as first,
    ):
        first.log_metrics({"reward": 0.5})
        raise RuntimeError("the flow dies")
    assert lineage.client.get_run(first.id).info.status == "FAILED"
    (tmp_path / "note.txt").write_text("hello")
    with lineage.run("loop-1", "rl", top) as again:
        assert again.id == first.id
        assert lineage.client.get_run(first.id).info.status == "RUNNING"
        again.log_steps(pd.DataFrame({"step": [1, 2], "k3": [1e-6, float("nan")], "note": ["a", "b"]}))
        again.log_params({"rl.lr": 1e-5})
        again.log_file(tmp_path / "note.txt", "notes")
        again.describe("# smol/2\n" + "x" * 9000)
    run = lineage.client.get_run(first.id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "rl of loop-1"
    assert run.data.tags["mlflow.parentRunId"] == top.id
    assert run.data.tags["target_version"] == "smol/2"
    assert [(m.step, m.value) for m in lineage.client.get_metric_history(first.id, "k3")] == [(1, 1e-6)]
    assert run.data.tags["mlflow.note.content"].startswith("# smol/2")
    assert [f.path for f in lineage.client.list_artifacts(first.id, "notes")] == ["notes/note.txt"]
    with pytest.raises(Refused), lineage.run("loop-1", "loop") as loop:
        raise Refused("a gate failed")
    assert loop.id == top.id
    ended = lineage.client.get_run(top.id)
    assert (ended.info.status, ended.data.tags["lockstep.outcome"]) == ("FINISHED", "refused")
    assert "mlflow.parentRunId" not in lineage.client.get_run(top.id).data.tags


REGISTRAR = """
import sys
from infra.lineage.aliases import nominate, promote
from infra.lineage.lineage import Lineage
from infra.store.refs import ArtifactRef

uri, me = sys.argv[1:]
lineage = Lineage(uri)
ref = lambda text: ArtifactRef(name=f"x/{text}", digest=f"sha256:{text}", bytes=1)
lineage.client, lineage.experiment
print("ready", flush=True)
sys.stdin.readline()
target = lineage.register_target("race", ref("same"), run_id="")
for i in range(20):
    one = dict(target=target, run_id="")
    drafter = lineage.register_drafter("race", ref(f"{me}-{i}"), evidence=[ref(f"e-{me}-{i}")], **one)
    lineage.register_quant("race", ref(f"shared-{i}"), **one)
    if i % 5 == 4:
        release = lineage.register_release("race", ref(f"r-{me}-{i}"), drafter=drafter, quant=None, **one)
        nominate(lineage, release)
        promote(lineage, release)
print(target.label)
"""


def test_processes_that_register_at_once(tmp_path: Path):
    """Also the first use of a database by all of them at the same time, and releases that are promoted at once."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([sys.executable, "-c", REGISTRAR, uri, str(i)], **pipes) for i in range(3)]
    assert [p.stdout.readline() for p in processes] == ["ready\n"] * 3
    for p in processes:
        p.stdin.write("go\n")
        p.stdin.flush()
    printed = [p.communicate(timeout=120)[0].strip() for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0]
    lineage = Lineage(uri)
    (target,) = lineage.versions("race")
    assert printed == [target.label] * 3
    drafters, quants = lineage.versions("race-drafter"), lineage.versions("race-quant")
    assert len(drafters) == 60 and len(quants) == 20
    releases = lineage.versions("race-release")
    assert target.links == {v.label: v.artifact.digest for v in drafters + quants + releases}
    assert all(len(v.evidence) == 1 for v in drafters)
    assert len(releases) == 12
    held = aliases(lineage, "race")
    assert held["champion"] != held["previous"] and {held["champion"], held["previous"]} <= {r.label for r in releases}
    assert lineage.resolve("race-drafter", "champion").label == lineage.get(held["champion"]).parts["drafter"]
    going_back = [roll_back(lineage, "race")[0].label]
    while "previous" in aliases(lineage, "race"):
        going_back.append(roll_back(lineage, "race")[0].label)
    assert len(going_back) == len(set(going_back))  # what each replaced leads back to the first, never around


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(LineageError, match="MLflow does not answer at http://127.0.0.1:9 .*lockstep up"):
        connect("http://127.0.0.1:9")
