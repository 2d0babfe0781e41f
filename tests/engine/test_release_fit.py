"""Parts that do not fit their target, planted: each is refused by the gate meant for it, with its figure."""

import json
from pathlib import Path

import pytest

from infra.config.gates import DEFAULT_GATES
from infra.lineage.lineage import Lineage
from infra.lineage.versions import Version
from infra.store.local import LocalStore
from infra.store.refs import ArtifactRef
from tasks.evaluate import evidence
from tasks.release import fit
from tasks.release.decision import decide
from tasks.release.gates import judge

FLAGS = dict.fromkeys(fit.NORM_FLAGS, False)


@pytest.fixture(scope="module")
def lineage(tmp_path_factory, book) -> Lineage:
    return Lineage(book(tmp_path_factory.mktemp("lineage") / "mlflow.db"))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> LocalStore:
    return LocalStore(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def target(lineage: Lineage, store: LocalStore, tiny_llama: Path, tmp_path_factory) -> Version:
    folder = tmp_path_factory.mktemp("target")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((tiny_llama / name).read_bytes())
    return lineage.register_target("fitting", store.put(folder, "target", producer="a test"), run_id="")


@pytest.fixture
def head(target, store, tmp_path):
    """`head(...)`: the artifact of an EAGLE-3 head of the target, with what is planted."""
    base = store.open(target.artifact)
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]

    known = fit.tokenizer(base)

    def head(*, flags=FLAGS, tokens=vocabulary, tokenizer=known, of=target.artifact) -> ArtifactRef:
        config = {"architectures": ["Eagle3DraftModel"], "transformer_layer_config": {"vocab_size": tokens}, **flags}
        folder = tmp_path / "head"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / fit.CARD).write_text(json.dumps({"target_tokenizer": tokenizer, "trained on": of.name}))
        return store.put(folder, "drafter", producer="a test", inputs=[of])

    return head


def refusals(part: Version, target: Version, store: LocalStore) -> list[str]:
    table = evidence.table(fit.rows(store, target, part), engine="e", hardware="h", command="a test")
    gates = [gate for gate in DEFAULT_GATES if gate.figure == f"{part.kind}_misfit"]
    verdicts = judge(table, gates, {part.kind: part.subject})
    decision = decide(verdicts, drafter=part.kind == "drafter", quant=part.kind == "quant")
    assert decision.target and (decision.drafter or decision.quant) == (not decision.reasons)
    return decision.reasons


def test_a_drafter_that_fits_passes(head, target, store, lineage):
    assert refusals(lineage.register_drafter("fitting", head(), target=target, run_id=""), target, store) == []


@pytest.mark.parametrize(
    ("planted", "domain"),
    [
        ({"flags": {k: v for k, v in FLAGS.items() if k != "norm_before_residual"}}, "norm flags"),
        ({"tokenizer": "sha256:another"}, "tokenizer"),
        ({"tokens": 1000}, "vocabulary"),
        ({"of": ArtifactRef(name="target/older", digest="sha256:older", bytes=1)}, "target"),  # stale
    ],
)
def test_a_drafter_that_does_not_is_left_out(head, target, store, lineage, planted, domain):
    drafter = lineage.register_drafter("fitting", head(**planted), target=target, run_id="")
    (reason,) = refusals(drafter, target, store)
    assert reason.startswith(
        f"released without the drafter: drafter fits its target: drafter_misfit on {domain} is 1 (n=1"
    )


def test_a_quant_with_another_tokenizer_is_left_out(target, store, lineage, tmp_path):
    base = store.open(target.artifact)
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text((base / "tokenizer.json").read_text() + "\n")
    quant = lineage.register_quant(
        "fitting", store.put(tmp_path, "quant", producer="a test", inputs=[target.artifact]), target=target, run_id=""
    )
    (reason,) = refusals(quant, target, store)
    assert "quant fits its target: quant_misfit on tokenizer is 1" in reason
