"""What `lockstep lineage --check` finds: broken links, damaged artifacts, and what was never measured."""

import pandas as pd
import pytest
from lineage_maker import Maker

from infra.lineage.check import Problem, check
from infra.lineage.lineage import Lineage
from infra.lineage.versions import ADOPTED, LINK


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
