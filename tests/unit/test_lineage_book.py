"""Versions, links, aliases and runs, in a real MLflow database."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from lineage_maker import Maker

from infra.config.target import TargetConfig
from infra.lineage.aliases import aliases, nominate, promote, roll_back
from infra.lineage.check import check
from infra.lineage.client import connect
from infra.lineage.lineage import Lineage
from infra.lineage.source import base_version
from infra.lineage.tree import render, tree
from infra.lineage.versions import LineageError
from infra.services.runs import Refused
from infra.store.models import ModelError


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
for i in range(10):
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
    printed = [p.communicate(timeout=1100)[0].strip() for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0]
    lineage = Lineage(uri)
    (target,) = lineage.versions("race")
    assert printed == [target.label] * 3
    drafters, quants = lineage.versions("race-drafter"), lineage.versions("race-quant")
    assert len(drafters) == 30 and len(quants) == 10
    releases = lineage.versions("race-release")
    assert target.links == {v.label: v.artifact.digest for v in drafters + quants + releases}
    assert all(len(v.evidence) == 1 for v in drafters)
    assert len(releases) == 6
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
