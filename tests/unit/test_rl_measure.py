"""What `lockstep measure rollout` asks of an engine, and how it tells what came of it."""

import statistics

import pytest
import rl_letters
from transformers import AutoTokenizer

from infra.config.flows import RLFlowConfig
from infra.config.rl import JsonlEnvironment, RLConfig
from infra.config.target import EngineConfig
from tasks.evaluate.measurement import MeasureError
from tasks.rl.environments.chat import Chat
from tasks.rl.measure import RolloutOptions, _findings, _requests
from tasks.rl.sweep import CHAT, CONFIGURED, Setting, changed, settings, together


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters")
    prompts = rl_letters.write_prompts(folder / "prompts.jsonl")
    environment = JsonlEnvironment(path=str(prompts), scorer="rl_letters:next_letter")
    config = RLFlowConfig(engine=EngineConfig(max_model_len=520), rl=RLConfig(environments=[environment], group_size=4))
    return Chat(AutoTokenizer.from_pretrained(rl_letters.write_model(folder / "model"))), config


def test_the_same_requests_are_made_every_time_and_their_lengths_have_a_long_tail(asked):
    chat, config = asked
    requests = _requests(chat, config, RolloutOptions(prompts=64, answer_tokens=512))
    assert requests == _requests(chat, config, RolloutOptions(prompts=64, answer_tokens=512))
    assert len(requests) == 256 and len({request.seed for request in requests}) == 256
    lengths = sorted(request.length for request in requests)
    assert 32 < statistics.median(lengths) < 56  # 512 / 12
    assert 256 < lengths[-3] <= lengths[-1] <= 512
    assert lengths[-3] / statistics.median(lengths) > 8
    with pytest.raises(MeasureError, match="a prompt of 3 tokens and --answer-tokens 518 exceed .*max_model_len=520"):
        _requests(chat, config, RolloutOptions(prompts=1, answer_tokens=518))


def measured(engine: EngineConfig, **speeds: float) -> list[tuple[Setting, float]]:
    """Settings by `knob_value=tokens/s`, the configured ones first."""
    found = [(Setting(CONFIGURED, engine), 100.0), (Setting(CHAT, changed(engine, max_concurrent_sequences=256)), 80.0)]
    knobs = {"n": "max_concurrent_sequences", "b": "max_batched_tokens", "c": "kv_cache_gib"}
    for name, speed in speeds.items():
        knob, value = knobs[name[0]], float(name[2:]) if name[0] == "c" else int(name[2:])
        found.append((Setting(f"{knob} {value}", changed(engine, **{knob: value}), knob), speed))
    return found


def test_a_sweep_goes_round_the_configured_settings_and_no_further_than_the_requests():
    engine = EngineConfig(max_concurrent_sequences=32, max_batched_tokens=2048, kv_cache_gib=0.5)
    assert [s.name for s in settings(engine, RolloutOptions(), 64)] == [CONFIGURED]
    tried = settings(engine, RolloutOptions(sweep=True, batched=[4096]), 64)
    assert [s.name for s in tried[:2]] == [CONFIGURED, CHAT]
    by_knob = {s.knob: [t.value for t in tried if t.knob == s.knob] for s in tried if s.knob}
    assert by_knob.pop("max_concurrent_sequences") == [8, 16, 64]
    assert by_knob.pop("max_batched_tokens") == [4096]
    assert len(by_knob) >= 1 and all(len(values) >= 1 for values in by_knob.values())  # the cache, graphs on GPUs
    wide = next(s for s in settings(engine, RolloutOptions(concurrent=[4096]), 4096) if s.knob)
    assert wide.engine.max_batched_tokens == 4096  # every sequence needs a token a step


def test_the_best_of_each_knob_is_tried_together_and_the_smallest_that_is_as_good_is_taken():
    engine = EngineConfig(max_concurrent_sequences=32, max_batched_tokens=2048, kv_cache_gib=0.5)
    assert together(measured(engine, n_64=120.0, n_128=121.0, b_4096=101.0)) is None  # one knob only
    best = together(measured(engine, n_64=120.0, n_128=121.0, b_4096=110.0, c_1=101.0)).engine
    assert (best.max_concurrent_sequences, best.max_batched_tokens, best.kv_cache_gib) == (64, 4096, 0.5)


def test_findings_name_the_pipelines_share_and_propose_settings_as_the_command_line_takes_them():
    engine = EngineConfig(max_concurrent_sequences=32, max_batched_tokens=2048)
    found = measured(engine, n_64=120.0, n_128=121.0)
    line = {"tokens a step": 2048, "tokens/s, pipeline": 98.0, "preemptions": 2.0, "KV cache peak": 0.5}
    table = [line | {"engine": s.name, "sequences": s.engine.max_concurrent_sequences, "tokens/s": v} for s, v in found]
    share, sweep = _findings(table, [0.97, 0.98, 0.99], found)
    assert "98 tokens/s, the same engine alone 100 with the same requests: 98.0% (rounds 97.0% to 99.0%)" in share
    assert sweep.startswith(
        "Proposed for rollouts: --set engine.max_concurrent_sequences=64. 120 tokens/s, 1.50 times a chat server's "
        "defaults (256 sequences, 2048 tokens a step) and 1.20 times the configured ones, with 2 preemptions a round"
    )
    assert "Proposed for rollouts: the configured settings." in _findings(table, [1.0], found[:2])[1]
    assert len(_findings(table[:1], [1.0], found[:1])) == 1
