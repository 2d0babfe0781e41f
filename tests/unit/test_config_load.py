"""Composition of presets, files and overrides, and what is said of a fault."""

import pytest

from flows.cli.run import FLOWS
from infra.config.flows import DrafterFlowConfig, LoopConfig, RLFlowConfig, Settings
from infra.config.load import ConfigError, load, presets


@pytest.fixture
def file(tmp_path):
    """`file(text)`: a TOML file with that text."""
    count = iter(range(9))

    def write(text):
        path = tmp_path / f"{next(count)}.toml"
        path.write_text(text)
        return path

    return write


def test_later_sources_win_and_tables_merge(file):
    first, second = file("[rl]\nlr = 1e-4\nsteps = 3\n"), file("[rl]\nlr = 2e-4\n")
    config = load(RLFlowConfig, preset="tiny", files=[first, second], overrides=["rl.group_size=2"])
    assert (config.rl.lr, config.rl.steps, config.rl.group_size) == (2e-4, 3, 2)
    assert config.target.name == "tiny"


def test_a_release_is_judged_at_a_concurrency_that_is_measured():
    with pytest.raises(ConfigError, match="at 4, 64: add 16 to drafter.load_concurrency"):
        load(LoopConfig, overrides=["release.concurrency=16", "drafter.load_concurrency=[64]"])
    judged = load(LoopConfig, overrides=["release.concurrency=64", "drafter.load_concurrency=[64]"]).release.judged
    assert {gate.name for gate in judged if gate.concurrency == 64} == {
        "speculation pays",
        "speculation pays on the quant",
    }


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid(name):
    load(LoopConfig, preset=name)


def test_one_file_can_hold_the_settings_of_every_flow():
    for kind, _ in FLOWS.values():
        settings = Settings().narrow(kind)
        assert settings == kind()


def test_sections_of_other_flows_are_checked_but_not_used(file):
    assert load(RLFlowConfig, files=[file("[drafter]\nlr = 1e-4\n")]) == RLFlowConfig()
    with pytest.raises(ConfigError, match="drafter.lrr: did you mean drafter.lr"):
        load(RLFlowConfig, files=[file("[drafter]\nlrr = 1e-4\n")])


@pytest.mark.parametrize(
    ("text", "value"),
    [("rl.lr=3e-4", 3e-4), ("rl.lr = 3e-4", 3e-4), ("rl.loss=grpo", "grpo"), ('rl.loss="grpo"', "grpo")],
)
def test_overrides_are_toml_or_plain_strings(text, value):
    config = load(RLFlowConfig, overrides=[text])
    assert value in (config.rl.lr, config.rl.loss)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[rl]\nlearning_rate = 1", "unknown key rl.learning_rate: did you mean rl.lr?"),
        ("[rl]\nstps = 1", "unknown key rl.stps: did you mean rl.steps?"),
        ("lr = 1", "unknown key lr: did you mean rl.lr or drafter.lr?"),
        ("[rll]\nlr = 1", "unknown key rll: did you mean rl?"),
        ("[rl]\nsteps = -1", "rl.steps = -1: input should be greater than or equal to 0"),
        ("[rl]\nloss = 'ppo'", "rl.loss = 'ppo': input should be 'grpo', "),
        ("[rl]\nadvantage = 'rloo'\ngroup_size = 1", "rl: advantage=rloo needs group_size of 2 or more"),
        ("[[rl.environments]]\ntype = 'reasoning_gym'\nname = 'x'\nparms = 1", "did you mean rl.environments.params?"),
        ("[[rl.environments]]\ntype = 'jsonl'\npath = 'x'", "rl.environments.0.scorer is missing: set it"),
        ("[rl]\nsteps =", "not valid TOML"),
        ("[rl.mismatch]\nwarn_ess = 0.5\nstop_ess = 0.6", "mismatch.warn_ess lies past mismatch.stop_ess"),
    ],
)
def test_a_fault_names_file_key_and_cure_on_one_line(file, text, said):
    path = file(text)
    with pytest.raises(ConfigError) as fault:
        load(RLFlowConfig, files=[path])
    (line,) = str(fault.value).splitlines()
    assert line.startswith(f"{path}: ")
    assert said in line


def test_every_fault_is_told_with_the_source_that_set_it(file):
    path = file("[rl]\nsteps = -1\nlr = 1e-5\n")
    with pytest.raises(ConfigError) as fault:
        load(RLFlowConfig, files=[path], overrides=["rl.lr=-1"])
    assert [line.split(": ")[0] for line in str(fault.value).splitlines()] == [str(path), "--set rl.lr=-1"]


@pytest.mark.parametrize("kind", [RLFlowConfig, LoopConfig])
def test_matched_numerics_need_one_precision(kind):
    with pytest.raises(ConfigError, match="rl.trainer_dtype is bfloat16, engine.dtype is float32"):
        load(kind, overrides=["rl.numerics=matched", "rl.trainer_dtype=bfloat16"])


@pytest.mark.parametrize("text", ["rl.lr", "=3", " = 3"])
def test_an_override_without_key_or_value_is_refused(text):
    with pytest.raises(ConfigError, match="section.key=value"):
        load(RLFlowConfig, overrides=[text])


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="smol or tiny"):
        load(LoopConfig, preset="smoll")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none.toml: cannot be read"):
        load(LoopConfig, files=[tmp_path / "none.toml"])


def test_a_list_replaces_a_list(file):
    text = "[drafter]\ntraffic = [{ domain = 'chat', source = 'writing', prompts = 2 }]"
    config = load(DrafterFlowConfig, preset="smol", files=[file(text)])
    assert [source.domain for source in config.drafter.traffic] == ["chat"]


def test_a_number_may_stand_where_text_is_asked_for():
    loaded = load(RLFlowConfig, overrides=["target.base_version=1"])
    assert loaded.target.base_version == "1"
