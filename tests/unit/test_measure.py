import numpy as np
import pytest
from typer.testing import CliRunner

from flows.cli.exits import Stop
from flows.cli.main import app
from flows.measure import MEASUREMENTS, measurement
from infra.config.base import Section
from infra.config.flows import FlowConfig
from infra.config.load import ConfigError
from tasks.evaluate import evidence
from tasks.evaluate.measurement import Line, Measured, Picture
from tasks.measure.weights import VOCABULARY, random_model
from tasks.report.measurement import write_page
from tasks.rl.measure_trainer import TrainerOptions, recorded


@pytest.mark.parametrize("what", MEASUREMENTS)
def test_every_measurement_is_a_command_whose_options_are_described(what):
    found = measurement(what)
    assert issubclass(found.config, FlowConfig) and issubclass(found.options, Section)
    found.options()  # it runs with nothing said
    told = " ".join(CliRunner().invoke(app, ["measure", what, "--help"]).output.split())  # wherever lines are broken
    for name, field in found.options.model_fields.items():
        assert f"--{name.replace('_', '-')}" in told and " ".join(field.description.split())[:40] in told


def test_an_option_that_cannot_be_used_is_one_line():
    result = CliRunner().invoke(app, ["measure", "transport", "--repeats", "many"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--repeats many: ") and "\n" not in str(result.exception)


def test_a_scorer_that_is_not_there_is_one_line(tmp_path):
    (tmp_path / "letters.jsonl").write_text('{"prompt": "a"}\n')
    where = f'[{{type = "jsonl", path = "{tmp_path}/letters.jsonl", scorer = "no_such_module:score"}}]'
    asked = ["measure", "asynchrony", "--preset", "tiny", "--set", f"rl.environments={where}"]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, Stop)
    assert str(result.exception).startswith("scorer no_such_module:score cannot be imported")


def test_a_page_shows_findings_table_charts_and_evidence(tmp_path):
    measured = Measured(
        rows=[evidence.row("speed", 2.5, n=3, unit="GB/s", subject="transport:shm", domain="shm/smol")],
        table=[{"transport": "shm", "GB/s": 2.5, "share": None}],
        findings=["shm moved 1 GB at 2.5 GB/s."],
        pictures=[Picture("Speed", "GB", "GB/s", [Line("shm", [(1, 2.5), (10, 3.0)])], log_x=True)],
    )
    table = evidence.table(measured.rows, engine="vllm 1", hardware="2x", command="lockstep measure transport")
    assert evidence.metrics(table) == {"speed/shm/smol": 2.5}
    page = write_page(tmp_path / "new", "transport", measured, table).read_text()
    assert "shm moved 1 GB at 2.5 GB/s." in page and "lockstep measure transport" in page
    assert page.count("<circle") == 2 and "<td" in page
    assert "| shm | 2.5 | – |" in (tmp_path / "new" / "table.md").read_text()


def test_recorded_rollouts_have_the_lengths_that_are_asked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    options = TrainerOptions(groups=25, answer_tokens=40)
    for long_tailed, spread in ((True, 8), (False, 1)):
        batch = recorded(tmp_path, 8, options, long_tailed=long_tailed)
        lengths = [len(answer) for group in batch.groups for answer in group.answers]
        assert len(lengths) == 200 and np.mean(lengths) == pytest.approx(40, rel=0.02)
        assert np.quantile(lengths, 0.99) / np.median(lengths) == pytest.approx(spread, rel=0.1)


def test_the_store_is_measured_beside_a_plain_copy_and_left_as_it_was(tmp_path):
    found = measurement("store")
    options = found.options(url=str(tmp_path / "store"), sizes=[1], files=2, repeats=1)
    measured = found.measure(None, options, print)
    assert [line["way"] for line in measured.table] == ["store", "fetch"]
    assert all(line["GB"] == 2 * 2**20 / 1e9 and line["share of plain"] > 0 for line in measured.table)
    assert {row["figure"] for row in measured.rows} >= {"store_store_share_of_plain", "store_fetch_share_of_plain"}
    assert not [path for path in (tmp_path / "store").rglob("part-*")]


@pytest.mark.parametrize("billions", [0.1, 0.5, 1, 8])
def test_a_random_model_has_the_size_asked_for(tmp_path, billions):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = random_model(billions, "bfloat16", tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    parameters = sum(p.numel() for p in model.parameters())
    assert abs(parameters / (billions * 1e9) - 1) < 0.15 and model.config.vocab_size == VOCABULARY
