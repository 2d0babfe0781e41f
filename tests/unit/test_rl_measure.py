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
from tasks.rl.measure import CHAT, RolloutOptions, _findings, _requests


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
    assert 48 < statistics.median(lengths) < 84  # 512 / 8
    assert 256 < lengths[-3] <= lengths[-1] <= 512
    with pytest.raises(MeasureError, match="a prompt of 3 tokens and --answer-tokens 518 exceed .*max_model_len=520"):
        _requests(chat, config, RolloutOptions(prompts=1, answer_tokens=518))


def test_findings_name_the_pipelines_share_and_the_fastest_settings():
    line = {"sequences": 8, "tokens a step": 2048, "tokens/s, pipeline": None}
    table = [
        line | {"engine": "configured", "tokens/s": 100.0, "tokens/s, pipeline": 98.0},
        line | {"engine": CHAT, "tokens/s": 80.0},
        line | {"engine": "16 sequences", "tokens/s": 120.0},
    ]
    share, sweep = _findings(table, [0.97, 0.98, 0.99])
    assert "98 tokens/s, the same engine alone 100 with the same requests: 98.0% (rounds 97.0% to 99.0%)" in share
    assert sweep.startswith("Fastest: 16 sequences, 120 tokens/s, 1.50 times a chat server's defaults (8 sequences")
