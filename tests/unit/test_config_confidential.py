"""Nothing secret becomes a setting: settings are kept where many read them."""

import pytest

from infra.config import confidential
from infra.config.flows import LoopConfig, RLFlowConfig
from infra.config.load import ConfigError, load, presets

WORD = "planted-271828182845"
GITHUB = "gh" + "p_" + "a1" * 18  # put together here, so that no scanner takes this file for a leak


@pytest.mark.parametrize(
    ("override", "where", "known_by"),
    [
        (f'engine.extra_flags=["--api-key={WORD}"]', "engine.extra_flags.0", "--api-key takes a secret"),
        (f'engine.extra_flags=["--hf-token", "{WORD}"]', "engine.extra_flags.0", "--hf-token takes a secret"),
        (
            f'rl.environments=[{{type="verifiers", taskset="x", env={{judge={{api_key="{WORD}"}}}}}}]',
            "rl.environments.0.env.judge.api_key",
            "its name is that of a secret",
        ),
        (f"target.source=https://ann:{WORD}@host/model", "target.source", "it has the form of a secret"),
        (f"target.source=package:{GITHUB}", "target.source", "it has the form of a secret"),
        (f"target.name=a{WORD}", "target.name", "it holds the value of JUDGE_KEY"),
        (f"engine.password={WORD}", "engine.password", "its name is that of a secret"),
    ],
)
def test_a_secret_among_the_settings_is_refused_and_not_repeated(override, where, known_by, monkeypatch):
    if known_by.endswith("JUDGE_KEY"):
        monkeypatch.setenv("JUDGE_KEY", WORD)
    with pytest.raises(ConfigError) as refused:
        load(LoopConfig, preset="tiny", overrides=[override])
    (line,) = str(refused.value).splitlines()
    key = override.partition("=")[0]
    assert line.startswith(f"--set {key}: {where}: {known_by}; ") and "environment variable" in line
    assert WORD not in line and GITHUB not in line


def test_one_that_comes_past_the_command_line_is_refused_too_and_not_repeated():
    """As from the form in Prefect."""
    given = {"engine": {"extra_flags": [f"--api-key={WORD}"]}, "rl": {"steps": WORD}}
    with pytest.raises(ValueError, match="engine.extra_flags.0: --api-key takes a secret") as refused:
        RLFlowConfig.model_validate(given)
    assert WORD not in str(refused.value)
    with pytest.raises(ValueError, match="rl.steps") as wrong:  # errors of other kinds are logged as well
        RLFlowConfig.model_validate({"rl": {"steps": WORD}})
    assert WORD not in str(wrong.value)


def test_what_only_sounds_secret_is_a_setting_like_others(monkeypatch):
    monkeypatch.setenv("SHORT_KEY", "tiny")
    monkeypatch.setenv("MY_CREDENTIALS", "/tiny/of/a/file")
    env = {"judge": {"api_key_var": "JUDGE_KEY", "eos_token": "</s>", "max_tokens": 5, "url": "http://host/a@b"}}
    settings = {
        "rl": {"environments": [{"type": "verifiers", "taskset": "x", "env": env}]},
        "engine": {"extra_flags": ["--max-model-len=5", "--enable-auto-tool-choice"]},
    }
    assert list(confidential.find(settings)) == []
    for preset in presets():
        whole = load(LoopConfig, preset=preset, overrides=["target.source=/tiny/of/a/file"])
        LoopConfig.model_validate(whole.model_dump(mode="json"))  # as it reaches the worker, with every setting named


def test_an_address_is_shown_without_who_may_use_it():
    assert confidential.shown("s3://id:word@bucket/prefix?key=word") == "s3://bucket/prefix"
    assert confidential.shown("http://127.0.0.1:5000/a") == "http://127.0.0.1:5000/a"
