"""What was made elsewhere and is adopted: checked first, linked, unproven, and refused by a release until measured."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from safetensors.numpy import save_file

from flows.adopt import adopt_drafter, adopt_quant, adopt_target
from infra.config.gates import DEFAULT_GATES
from infra.lineage.check import check
from infra.lineage.lineage import Lineage
from infra.lineage.versions import LineageError
from infra.store.models import ModelError
from infra.store.open import open_store
from tasks.drafter.contract import ContractError
from tasks.drafter.export import read_card
from tasks.evaluate import evidence
from tasks.quant.schemes import SchemeError
from tasks.release.candidate import TABLE, Candidate, gather
from tasks.release.decision import decide
from tasks.release.gates import judge

HEAD = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 512,
    "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
    "transformer_layer_config": {"hidden_size": 128, "vocab_size": 49152},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, book) -> Path:
    """A home of its own; no server is told of what is adopted."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    book(tmp_path / "home/mlflow/mlflow.db")
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "LOCKSTEP_STORE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def model(home: Path, tiny_llama: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, home / "model"))


def write_head(folder: Path, **changes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HEAD | changes))
    save_file({"fc.weight": pd.Series([1.0]).to_numpy()}, folder / "model.safetensors")
    return folder


def quantized(model: Path, folder: Path, **changes) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}} | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_all_three_are_linked_and_unproven_and_no_release_serves_them(home, model):
    target = adopt_target("mine", model)
    drafter = adopt_drafter("mine", write_head(home / "head"), target.label)
    quant = adopt_quant("mine", quantized(model, home / "quant"), target.label)
    lineage, store = Lineage(), open_store()
    assert adopt_target("mine", model) == lineage.get(target.label)
    assert all(version.unproven for version in (target, drafter, quant))
    assert lineage.get(target.label).links.keys() == {drafter.label, quant.label}
    assert quant.tags["lockstep.scheme"] == "int-quantized"
    card = read_card(store.open(drafter.artifact))
    assert (card.kind, card.layer_ids, card.num_speculative_tokens) == ("eagle3", [2, 4, 5], 3)
    assert check(lineage, store, "mine") == []

    candidate = Candidate(target=target, drafter=drafter, quant=quant)
    gather(lineage, store, candidate, home)
    verdicts = judge(evidence.read(home / TABLE), DEFAULT_GATES, candidate.subjects, has_parent=False)
    assert {v.name: v.verdict for v in verdicts}["adopted target measured"] == "fail"
    decision = decide([v for v in verdicts if v.part != "target"], drafter=True, quant=True)
    assert not decision.drafter and not decision.quant
    assert any("acceptance_length was never measured" in reason for reason in decision.reasons)
    assert any("quant_kl was never measured" in reason for reason in decision.reasons)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(speculators_model_type="mtp"), "is not an EAGLE-3 head in speculators' format"),
        (dict(transformer_layer_config={"hidden_size": 64, "vocab_size": 49152}), "its hidden_size is 64"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3]), "its auxiliary layers is"),
    ],
)
def test_a_head_that_cannot_serve_the_target_is_refused(home, model, changes, said):
    target = adopt_target("mine", model)
    with pytest.raises(ContractError, match=said):
        adopt_drafter("mine", write_head(home / "head", **changes), target.label)
    assert Lineage().drafters(target) == []
    assert open_store().list("drafter") == []


def test_what_is_no_copy_of_the_target_is_refused(home, model):
    target = adopt_target("mine", model)
    for folder, said in (
        (model, "is not quantized"),
        (quantized(model, home / "deeper", num_hidden_layers=9), "its num_hidden_layers is 9, not 8"),
    ):
        with pytest.raises(SchemeError, match=said):
            adopt_quant("mine", folder, target.label)
    with pytest.raises(LineageError, match="that is not a version of the target other"):
        adopt_quant("other", model, target.label)
    with pytest.raises(LineageError, match="there is no mine/7"):
        adopt_quant("mine", model, "mine/7")


def test_a_folder_that_is_no_model_or_was_cut_off_is_refused(home, model):
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        adopt_target("mine", home / "nowhere")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match="model.safetensors is not a whole file of weights"):
        adopt_target("mine", model)
    weights.write_bytes(whole)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(ModelError, match="has 49152 tokens, the model 100: they do not match"):
        adopt_target("mine", model)
    assert Lineage().resolve("mine", "latest") is None
