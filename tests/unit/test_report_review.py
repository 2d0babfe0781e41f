"""The review's verdicts on planted evidence: each question can be passed, failed, and left open."""

from datetime import UTC, datetime, timedelta
from html import unescape

import pandas as pd
import pytest
import report_sample as sample

from infra.config.review import ReviewConfig
from infra.config.rl import RLConfig
from infra.lineage.lineage import Lineage
from infra.lineage.runs import MEASURED, newest_measured
from infra.services.history import Started, Trigger
from infra.services.runs import Run
from tasks.evaluate import evidence
from tasks.report.measured import Measured
from tasks.report.review.findings import Fact, Review
from tasks.report.review.known import Known, PastRun
from tasks.report.review.page import headline, terminal, write
from tasks.report.review.questions import answer

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
TARGET, DRAFTER = "target:smol/3", "drafter:smol/2"
GOOD = {
    ("weight_sync_bytes", "nccl"): 16e9,
    ("weight_sync_bandwidth", "nccl"): 40e9,
    ("weight_sync_pause_max", "nccl"): 0.3,
    ("weight_sync_share", "nccl"): 0.02,
    ("engine_idle_share", "colocated"): 0.45,
    ("trainer_idle_share", "colocated"): 0.6,
    ("rollout_length_max", ""): 4096.0,
    ("rollout_tokens_per_second", ""): 16500.0,
    ("decode_share", ""): 0.93,
    ("kv_cache_peak", ""): 0.7,
    ("preemptions", ""): 0.0,
    ("prefix_hit_rate", ""): 0.6,
    ("acceptance_length", "chat"): 2.1,
    ("acceptance_length", "production"): 2.4,
    ("acceptance_length", "all"): 2.3,
    ("speculation_speedup", ""): 1.6,
}
DRAFTERS = ("acceptance_length", "speculation_speedup")
TRAINING = RLConfig().model_dump(mode="json")


def started(flow: str, by: str = "automation", state: str = "Completed") -> Started:
    name = "on target registered" if by == "automation" else ""
    return Started(
        flow=flow, run="r", target="smol", by=by, automation=name, state=state, ended=NOW, url="http://prefect/runs/1"
    )


def loop(**changes) -> Run:
    given = dict(
        key="loop-1", flow="loop", target="smol", config_digest="", config={}, started=NOW - timedelta(minutes=9),
        flow_run_ids=["1"], status="finished", finished=NOW,
        outcome={"phases": dict.fromkeys(("rl", "drafter", "quantize", "release"), {})},
    )  # fmt: skip
    return Run(**given | changes)


def known(changes: dict | None = None, *, drafts: int = 900, k3: tuple[float, ...] = (1e-4, 2e-4), **facts) -> Known:
    """What all questions pass on, with `changes` of its figures; one of None was not measured."""
    figures = {k: v for k, v in (GOOD | (changes or {})).items() if v is not None}
    rows = [
        evidence.row(figure, value, n=drafts, unit="", domain=domain, subject=DRAFTER if figure in DRAFTERS else TARGET)
        for (figure, domain), value in figures.items()
    ]
    tree, _ = sample.lineage()
    node = tree.targets[2]
    versions = {
        "release": node.releases[0], "target": node.version, "drafter": node.drafters[0], "quant": node.quants[0]
    }  # fmt: skip
    given = dict(
        versions=versions,
        measured=Measured(
            evidence=evidence.table(rows, engine="vllm 0.32.0", hardware="H200", command="lockstep rl"),
            steps=pd.DataFrame({"step": range(1, len(k3) + 1), "k3": k3, "step_s": 40.0}),
        ),
        training=TRAINING,
        engine={"dtype": "bfloat16"},
        past=[PastRun("smol/2", 3e-4, 0, 2), PastRun("smol/3", 2e-4, 0, 2)],
        automated=True,
        triggers=[Trigger(name="on target registered", enabled=True, starts=["drafter"])],
        triggered=[started("drafter")],
        loop=loop(),
        started=started("loop"),
    )
    return Known(**given | facts)


def verdicts(case: Known) -> dict[str, str]:
    return {f.key: f.verdict for f in answer(case, ReviewConfig())}


def test_all_pass_on_good_evidence_and_each_figure_says_where_it_comes_from():
    findings = answer(known(), ReviewConfig())
    assert [f.key for f in findings] == [
        "weight-sync", "placement", "mismatch", "rollouts", "acceptance", "trigger", "automation"
    ]  # fmt: skip
    assert {f.verdict for f in findings} == {"pass"}
    assert all(f.because and f.change and f.facts and all(fact.source for fact in f.facts) for f in findings)
    assert findings[0].because == "nccl moves 14.9 GiB in 0.4 s; publishing and moving take 2% of a step, within 10%"
    told = {fact.name: fact.value for f in findings for fact in f.facts}
    assert told["bandwidth that the bound asks for"] == "3.73 GiB/s, all counted"
    assert told["history: smol/2"] == "worst k3 3e−4, 0 of 2 steps marked"
    assert told["acceptance, production"] == "2.4 tokens per pass, n=900 drafts"


@pytest.mark.parametrize(
    ("question", "verdict", "case"),
    [
        ("weight-sync", "fail", dict(changes={("weight_sync_share", "nccl"): 0.3})),
        ("weight-sync", "unknown", dict(changes={("weight_sync_bandwidth", "nccl"): None})),
        ("placement", "fail", dict(changes={("trainer_idle_share", "colocated"): 0.9})),
        ("placement", "unknown", dict(changes={("engine_idle_share", "colocated"): None})),
        ("mismatch", "fail", dict(k3=(1e-4, 0.2))),
        ("mismatch", "fail", dict(k3=(1e-4, float("nan")))),
        ("mismatch", "unknown", dict(training={})),
        ("rollouts", "fail", dict(changes={("decode_share", ""): 0.3})),
        ("rollouts", "fail", dict(changes={("kv_cache_peak", ""): 0.99})),
        ("rollouts", "unknown", dict(changes={("rollout_length_max", ""): 64.0})),
        ("rollouts", "unknown", dict(changes={("decode_share", ""): None})),
        ("acceptance", "fail", dict(changes={("speculation_speedup", ""): 0.8})),
        ("acceptance", "unknown", dict(drafts=20)),
        ("acceptance", "unknown", dict(changes={key: None for key in GOOD if key[0] == "acceptance_length"})),
        ("trigger", "fail", dict(triggers=[])),
        ("trigger", "fail", dict(automated=False)),
        ("trigger", "fail", dict(triggers=[Trigger(name="off", enabled=False, starts=["drafter"])])),
        ("trigger", "unknown", dict(triggered=[])),
        ("trigger", "unknown", dict(triggered=[started("drafter", state="Failed"), started("watch")])),
        ("automation", "fail", dict(loop=loop(status="abandoned"))),
        ("automation", "fail", dict(loop=loop(outcome={"phases": {"rl": {}}}))),
        ("automation", "unknown", dict(loop=None)),
        ("automation", "unknown", dict(started=started("loop", by="person"))),
    ],
)  # fmt: skip
def test_one_planted_fault_changes_one_verdict(question, verdict, case):
    found = verdicts(known(**case))
    assert found.pop(question) == verdict
    assert set(found.values()) == {"pass"}


def test_transports_that_were_measured_are_told_with_their_size_for_this_target_and_where_they_were():
    def rows(domain: str, gb: float, gb_per_s: float):
        seconds = dict(publish=0.1, prepare=1.5, transfer=gb / gb_per_s, finalize=0.1, pause=0.4, verify=0.3)
        figures = {f"transport_{part}_s": value for part, value in seconds.items()}
        figures |= {"transport_gb_per_s": gb_per_s, "transport_copy_gb_per_s": 50.0, "transport_share_of_copy": 0.5}
        return [evidence.row(f, v, n=5, unit="", domain=domain, subject="transport") for f, v in figures.items()]

    plan = {"plan_gb": 16.0, "plan_needed_gb_per_s": 5.3, "plan_gb_per_s": 4.0, "plan_share_of_step": 0.06}
    table = [*rows("shm/smol", 16, 25.0), *rows("shm/random", 32, 20.0), *rows("store/small", 1, 2.0)]
    table += [
        *rows("store/large", 9, 1.0),
        *(evidence.row(f, v, n=2, unit="", domain="shm", subject="") for f, v in plan.items()),
    ]
    measured = evidence.table(table, engine="vllm", hardware="H200", command="lockstep measure transport")
    case = known(transports=measured, transports_from="lockstep measure transport: MLflow run 7, H200")
    told = {f.name: f for f in answer(case, ReviewConfig())[0].facts if f.source.endswith("MLflow run 7, H200")}
    assert {name: fact.value for name, fact in told.items()} == {
        "measured: shm, smol": "16 GB at 25 GB/s, 50% of a plain copy; an update takes 2 s, the pause 0.4 s of it; "
        "5% of a step of this target's training",
        "sized for a fleet: shm": "16 GB an engine need 5.3 GB/s, 4 GB/s all counted: too slow",
        "measured: store, large": "9 GB at 1 GB/s, 50% of a plain copy; an update takes 2 s, the pause 0.4 s of it",
    }
    assert verdicts(case) == verdicts(known())  # what else there is changes nothing of what was used


def test_the_newest_measurement_of_the_target_is_found(tmp_path, book):
    lineage = Lineage(book(tmp_path / "mlflow.db"))
    runs = {}
    for key, what, target in (("a", "transport", "smol"), ("b", "transport", "smol"), ("c", "transport", "other")):
        with lineage.run(key, "measure", model=target, tags={MEASURED: what}) as run:
            runs[key] = run.id
    with pytest.raises(ZeroDivisionError), lineage.run("d", "measure", model="smol", tags={MEASURED: "transport"}):
        raise ZeroDivisionError
    assert newest_measured(lineage.client, lineage.experiment, "transport", "smol") == runs["b"]
    assert newest_measured(lineage.client, lineage.experiment, "store", "smol") is None


def test_a_release_that_events_led_to_is_a_loop_without_a_person():
    chained = [started("drafter"), started("release")]
    assert verdicts(known(loop=None, triggered=chained))["automation"] == "pass"
    assert verdicts(known(loop=loop(status="abandoned"), triggered=chained))["automation"] == "fail"


def test_separate_pools_are_judged_by_the_idler_one():
    apart = {("engine_idle_share", "colocated"): None, ("trainer_idle_share", "colocated"): None}
    idle = {("engine_idle_share", "disaggregated"): 0.05, ("trainer_idle_share", "disaggregated"): 0.5}
    assert verdicts(known(apart | idle))["placement"] == "fail"
    idle[("trainer_idle_share", "disaggregated")] = 0.15
    assert verdicts(known(apart | idle))["placement"] == "pass"


def test_page_markdown_json_and_terminal_say_the_same(tmp_path):
    findings = answer(known({("weight_sync_share", "nccl"): 0.3}, triggered=[]), ReviewConfig())
    review = Review(
        release="smol-release/2", serves=["smol/3"], reviewed="2026-01-05T12:00:00+00:00", findings=findings
    )
    page = write(tmp_path, review).read_text()
    markdown, text = (tmp_path / "review.md").read_text(), terminal(review)
    assert Review.model_validate_json((tmp_path / "review.json").read_text()) == review
    assert headline(review) == "smol-release/2: 5 pass, 1 fail, 1 unknown"
    for form in (unescape(page), markdown, text):
        assert headline(review) in form
        for finding in findings:
            assert finding.question in form and finding.because in form and finding.change in form
    assert 'href="http://prefect/runs/1"' in page
    assert page.count("✗ fail") == 2  # overview and section
    fact = Fact(name="size", value="1 GB", source=f"smol/3: MLflow run {'ab' * 16}, evidence/1")
    told = review.model_copy(update={"findings": [findings[0].model_copy(update={"facts": [fact]})]})
    page = write(tmp_path, told, "http://mlflow/#/experiments/1/runs/").read_text()
    address = f"http://mlflow/#/experiments/1/runs/{'ab' * 16}"
    assert f'From smol/3: <a href="{address}">MLflow run</a>, evidence/1' in page
    assert f"From smol/3: [MLflow run]({address}), evidence/1." in (tmp_path / "review.md").read_text()
