"""A release served by a real engine: answers over HTTP, no RL endpoints, and a record that can be judged again."""

from pathlib import Path

import pytest

from infra.config.flows import ReleaseFlowConfig
from infra.config.gates import Gate
from infra.config.release import ReleaseConfig
from infra.config.target import EngineConfig, TargetConfig
from infra.engine.spec import EngineSpec, Role
from infra.lineage.aliases import aliases
from infra.lineage.check import check
from infra.lineage.lineage import Lineage
from infra.lineage.source import base_version
from infra.lineage.versions import LineageError, Version
from infra.store.local import LocalStore
from infra.store.open import open_store
from tasks.evaluate import evidence
from tasks.release import serve, steps, takeover
from tasks.release.candidate import choose
from tasks.release.record import judge_again

GATES = [
    Gate(name="lineage intact", part="safety", figure="lineage_problems", comparison="==", bound=0),
    Gate(name="compared", part="target", figure="parent_is_champion", comparison="==", bound=1, against_parent=True),
    Gate(name="better", part="target", figure="reward_difference", comparison=">=", bound=0.0),
    Gate(name="fast", part="drafter", figure="speculation_speedup", comparison=">", bound=1.0),
]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, book):
    """Lineage, store and configuration of a target of its own, as the environment gives them to every step."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", book(home / "mlflow.db"))
        patch.setenv("LOCKSTEP_STORE", str(home / "artifacts"))
        config = ReleaseFlowConfig(
            target=TargetConfig(name="released", source=str(tiny_llama)),
            engine=EngineConfig(cpu_threads=1, kv_cache_gib=0.25, max_model_len=512),
            release=ReleaseConfig(gates=GATES, questions=["What is 7 times 8?", "Who are you?"], max_new_tokens=8),
        )
        yield Lineage(), open_store(), config


def measured(lineage: Lineage, store: LocalStore, version: Version, folder: Path, **figures: float) -> Version:
    rows = [evidence.row(f, value, n=10, unit="", subject=version.subject) for f, value in figures.items()]
    folder.mkdir()
    evidence.write(evidence.table(rows, engine="e", hardware="h", command="a test"), folder / "evidence.parquet")
    measured_on = [version.artifact, *version.inputs]
    return lineage.attach_evidence(version, store.put(folder, "evidence", producer="a test", inputs=measured_on))


def test_release_then_refuse(house, tmp_path: Path):
    lineage, store, config = house
    one = base_version(lineage, store, config.target)
    two = lineage.register_target("released", one.artifact, parent=one, run_id="one")
    two = measured(lineage, store, two, tmp_path / "two", reward_difference=0.1)
    drafter = lineage.register_drafter("released", one.artifact, target=two, run_id="")
    measured(lineage, store, drafter, tmp_path / "drafter", speculation_speedup=0.7)

    candidate = steps.choose_candidate.fn("released", config.release, None, None, None, "run")
    assert [v.label for v in candidate.versions] == ["released/2", "released-drafter/1"]
    table = steps.gather_evidence.fn(candidate, "run")
    judgement = steps.judge_by_gates.fn(candidate, table, config.release)
    assert {v.name: v.verdict for v in judgement.verdicts} == {
        "lineage intact": "pass",
        "compared": "pass",
        "better": "pass",
        "fast": "fail",
    }
    decision = judgement.decision
    assert (decision.target, decision.drafter) == (True, False)
    assert "speculation_speedup is 0.7" in decision.reasons[0]
    assert "slower than plain decoding" in decision.reasons[0]

    kept = candidate.kept(drafter=decision.drafter, quant=decision.quant)
    served = steps.serve_release.fn(kept, config, "run")
    assert [a.question for a in served.answers] == config.release.questions
    assert all(1 <= a.tokens <= 8 for a in served.answers)
    assert served.drafts == 0
    assert served.spans["engine_start"] > 0
    record = steps.keep_record.fn(candidate, table, judgement, served)
    release = steps.register(kept, judgement, record, config, "", None)
    assert aliases(lineage, "released") == {"candidate": release.label}
    takeover.make_champion(kept, release, None, config)
    assert aliases(lineage, "released") == {"champion": release.label}
    assert release.parts == {"target": two.label}
    assert "speculation_speedup" in release.tags["lockstep.left_out"]
    assert check(lineage, store, "released") == []
    assert judge_again(store.open(record)) == judgement

    three = lineage.register_target("released", one.artifact, parent=one, run_id="another")
    measured(lineage, store, three, tmp_path / "three", reward_difference=-0.1)
    worse = choose(lineage, "released", "latest", "latest", "latest")
    table = steps.gather_evidence.fn(worse, "run 2")
    refusal = steps.judge_by_gates.fn(worse, table, config.release)
    assert not refusal.decision.target
    assert "parent_is_champion" in refusal.decision.refusal  # trained from version 1, the champion is version 2
    assert "reward_difference is -0.1" in refusal.decision.refusal
    record = steps.keep_record.fn(worse, table, refusal, None)
    steps.refuse(worse, refusal, record)
    assert "reward_difference" in lineage.get(three.label).tags["lockstep.refused"]
    assert judge_again(store.open(record)) == refusal
    assert aliases(lineage, "released") == {"champion": release.label}


def test_choosing(house):
    lineage, store, config = house
    base_version(lineage, store, config.target)
    with pytest.raises(LineageError, match="release.target=9: released has no such version"):
        choose(lineage, "released", "9", "none", "none")
    with pytest.raises(LineageError, match="release.quant=released-quant/4: released-quant has no such version"):
        choose(lineage, "released", "released/1", "latest", "released-quant/4")
    with pytest.raises(LineageError, match="that is not a version of released-drafter"):
        choose(lineage, "released", "1", "other-drafter/1", "none")
    assert choose(lineage, "released", "released/1", "none", "none").versions == [lineage.get("released/1")]


def test_a_serve_engine_has_no_rl_endpoints_and_a_rollout_engine_is_not_released(
    engine, tiny_llama: Path, tiny_engine_config: EngineConfig, run
):
    spec = EngineSpec(model=tiny_llama, role=Role.rollout, config=tiny_engine_config)
    handle = engine(spec).handle()
    assert run(serve.exposed(handle)) == list(serve.RL_PATHS)
    with pytest.raises(serve.ServeError, match="answers on /pause.* must not be released"):
        run(serve.ask(handle, ["hello"], 4))
