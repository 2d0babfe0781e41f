"""The table of one drafter across a target's quants, from evidence in a book and a store of the test's own."""

from pathlib import Path

import pytest
from lineage_maker import Maker

from flows.cli.measure import _text
from flows.measure import measure
from infra.config.flows import FlowConfig
from infra.config.target import TargetConfig
from infra.lineage.lineage import Lineage
from infra.store.open import open_store
from tasks.evaluate import evidence
from tasks.evaluate.evidence import row
from tasks.evaluate.measurement import MeasureError
from tasks.quant.table import QuantsOptions

NAME = "mine"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, book) -> Maker:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    book(tmp_path / "home/mlflow/mlflow.db")
    for name in ("MLFLOW_TRACKING_URI", "LOCKSTEP_STORE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "made").mkdir()
    return Maker(Lineage(), open_store(), NAME, tmp_path / "made")


def measured(make: Maker, version, **figures: dict[str, float]):
    """Attach evidence: by figure, its value by domain."""
    rows = [
        row(figure, value, low=value - 0.03, high=value + 0.04, n=10, unit="", subject=version.subject, domain=domain)
        for figure, values in figures.items()
        for domain, value in values.items()
    ]
    table = evidence.table(rows, engine="vllm 1", hardware="one GPU", command="c")
    return make.lineage.attach_evidence(version, make.artifact("evidence", table))


def drafter(make: Maker, target, parent=None, **figures):
    origin = dict(target=target, parent=parent, run_id="")
    return measured(make, make.lineage.register_drafter(NAME, make.artifact("drafter"), **origin), **figures)


def quant(make: Maker, target, scheme: str, tried=None, **figures):
    tags = {"lockstep.scheme": scheme, "lockstep.recipe": "RTN"}
    made = make.lineage.register_quant(NAME, make.artifact("quant"), target=target, run_id="", tags=tags)
    return measured(make, made, **figures | ({"quant_drafter_version": {"": tried.version}} if tried else {}))


def ask(said: list[str] | None = None):
    config = FlowConfig(target=TargetConfig(name=NAME))
    return measure("quants", config, QuantsOptions(), command="c", say=(said if said is not None else []).append)


def test_one_drafter_across_quants_kept_and_retrained(make):
    target = make.target()
    head = drafter(
        make,
        target,
        acceptance_length={"chat": 1.9, "all": 2.0},
        acceptance_rate_position_1={"chat": 0.5, "all": 0.6},
        speculation_speedup={"": 1.5},
    )
    with pytest.raises(MeasureError, match="no quant of mine/1 was measured with a drafter: `lockstep drafter`"):
        ask()
    for version in (
        quant(make, target, "W4A16", head, quant_acceptance_length={"all": 9.0}),  # of which there is a newer one
        quant(
            make,
            target,
            "W4A16",
            head,
            quant_acceptance_length={"chat": 1.7, "all": 1.8},
            quant_acceptance_length_retrained={"chat": 1.8, "all": 1.95},
            quant_acceptance_rate_position_1={"all": 0.5},
            quant_acceptance_rate_position_2={"all": 0.25},
            quant_acceptance_rate_position_1_retrained={"all": 0.6},
            quant_kl={"chat": 0.02, "all": 0.03},
            quant_size_ratio={"": 0.4},
            quant_speculation_speedup={"": 1.4},
        ),
    ):
        assert version.parts["target"] == target.label
    found = ask()
    lines = {(line["scheme"], line["domain"]): line for line in found.table}
    assert list(lines) == [("base", "chat"), ("base", "all"), ("W4A16 RTN", "chat"), ("W4A16 RTN", "all")]
    assert (lines["base", "all"]["kept"], lines["base", "all"]["retrained"], lines["base", "all"]["±"]) == (
        2,
        None,
        None,
    )
    quantized = lines["W4A16 RTN", "all"]
    assert (quantized["kept"], quantized["retrained"], quantized["drafts"]) == (1.8, 1.95, 10)
    assert quantized["gain"] == pytest.approx(0.15) and quantized["±"] == pytest.approx(0.04 * 2**0.5)
    assert quantized["kept by position"] == "0.500 0.250" and quantized["retrained by position"] == "0.600"
    assert (lines["W4A16 RTN", "chat"]["KL, nats"], lines["base", "chat"]["KL, nats"]) == (0.02, None)
    base, told, where = found.findings
    assert base == "base: kept as it is, the drafter accepts 2.000 tokens a pass; 1.50 times as fast with it as without"
    assert told == (
        "W4A16 RTN: kept as it is, the drafter accepts 1.800 tokens a pass (-10.0% against the base); retrained on the "
        "quant's own states 1.950 (+0.150 ± 0.057); 1.40 times as fast with it as without; KL to the base 0.03 "
        "nats/token, 0.40 of the base's size"
    )
    assert where == "measured on one GPU, vllm 1"
    page = found.page.read_text()
    assert "W4A16 RTN, retrained: 0.6 share of drafts at 1 proposed token" in page and "<td" in page
    assert max(map(len, _text(found).split("\n\n")[0].splitlines())) <= 120  # of the table, in a terminal


def test_as_much_training_on_the_base_is_what_retraining_is_compared_with(make):
    target = make.target()
    head = drafter(make, target, acceptance_length={"all": 2.4}, speculation_speedup={"": 1.5})
    drafter(make, target, acceptance_length={"all": 3.0})  # made from nothing: no control
    control = drafter(
        make,
        target,
        head,
        acceptance_length_before={"all": 2.0},
        acceptance_length={"all": 2.1},
        acceptance_rate_position_1_before={"all": 0.6},
        acceptance_rate_position_1={"all": 0.7},
    )
    quant(make, target, "W8A8", quant_acceptance_length={"all": 5.0})  # with no drafter
    for scheme, tried in (("W8A8", control), ("W8A8", head), ("FP8_DYNAMIC", head)):
        figures = dict(quant_acceptance_length={"all": 1.9}, quant_acceptance_length_retrained={"all": 2.2})
        made = quant(make, target, scheme, tried, **figures)
    assert made.version == 4
    said: list[str] = []
    found = ask(said)
    none, *others = found.table
    # beside each other in one run, in place of what the kept one was measured to accept before
    assert (none["kept"], none["retrained"], none["kept by position"]) == (2.0, 2.1, "0.600")
    assert none["retrained by position"] == "0.700"
    assert [(line["scheme"], line["kept"]) for line in others] == [("W8A8 RTN", 1.9), ("FP8_DYNAMIC RTN", 1.9)]
    assert "mine-quant/1 is left out: no drafter was tried on it" in said
    assert "mine-quant/2 is left out: drafter 3 was tried on it" in said
    assert "trained further on the base 2.100 (+0.100 ± 0.057); 1.50 times" in found.findings[0]
    assert (
        "(-5.0% against the base); retrained on the quant's own states 2.200 (+0.300 ± 0.057, +0.200 ± 0.080 beyond "
        in (found.findings[1])
    )
