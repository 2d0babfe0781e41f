"""The review's verdicts on planted evidence: each question can be passed, failed, and left open."""

from datetime import UTC, datetime, timedelta
from html import unescape

import pandas as pd
import pytest
import report_sample as sample

from infra.config.review import ReviewConfig
from infra.services.history import Started, Trigger
from infra.services.runs import Run
from tasks.evaluate import evidence
from tasks.report.measured import Measured
from tasks.report.review.findings import Review
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
TRAINING = {"mismatch": {"warn_k3": 1e-3, "stop_k3": 1e-1}, "correction": "tis", "correction_high": 2.0}


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
