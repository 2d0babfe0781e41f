"""Who may call what: every route but /health wants the key, and only rollout and capture engines have RL routes."""

import json
import re

import aiohttp
import pytest

from infra.engine.client import EngineClient
from infra.engine.errors import EngineError
from infra.engine.spec import Capture, EngineSpec, Role

RL_ROUTES = {
    "/collective_rpc",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/update_weights",
    "/weight_checker",
    "/server_info",
}


@pytest.fixture(scope="module", params=Role)
def of_every_role(request, engine, tiny_llama, tiny_engine_config, tmp_path_factory):
    """An engine of each role, one after the other: all tests of one role use the same."""
    capture = Capture(layer_ids=[2, 4, 8], folder=tmp_path_factory.getbasetemp() / "captured")
    return engine(
        EngineSpec(
            model=tiny_llama,
            role=request.param,
            config=tiny_engine_config,
            capture=capture if request.param is Role.capture else None,
        )
    )


def routes(log: str) -> set[tuple[str, str]]:
    """(method, path) of everything that the server says it serves."""
    found = re.findall(r"Route: (\S+), Methods: (.+)", log)
    mounted = {("GET", "/metrics")}
    return mounted | {(method, path) for path, methods in found for method in methods.split(", ")}


async def statuses(engine, asked: set[tuple[str, str]], headers: dict[str, str]) -> dict[tuple[str, str], int]:
    found = {}
    async with aiohttp.ClientSession(engine.url, headers=headers) as session:
        for method, path in sorted(asked):
            async with session.request(method, re.sub(r"\{.*?\}", "x", path)) as response:
                found[method, path] = response.status
    return found


def test_every_route_but_health_wants_the_key(of_every_role, run):
    served = routes(of_every_role.log.read_text())
    assert ("GET", "/health") in served and ("POST", "/v1/completions") in served and len(served) > 30
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": of_every_role.key}):
        found = run(statuses(of_every_role, served | {("GET", "/no/such/path")}, headers))
        assert found.pop(("GET", "/health")) == 200
        assert set(found.values()) == {401}, {route: status for route, status in found.items() if status != 401}


def test_websockets_want_the_key_too(of_every_role, run):
    async def connect() -> None:
        async with aiohttp.ClientSession(of_every_role.url) as session, session.ws_connect("/v1/realtime"):
            pass

    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        run(connect())
    assert refused.value.status == 403  # how ASGI servers refuse a websocket


def test_only_rollout_and_capture_engines_have_rl_routes(of_every_role, run):
    paths = {path for _, path in routes(of_every_role.log.read_text())}
    assert (paths & RL_ROUTES) == (RL_ROUTES if of_every_role.spec.role.has_rl_endpoints else set())

    key = {"Authorization": f"Bearer {of_every_role.key}"}
    found = run(statuses(of_every_role, {("POST", "/collective_rpc"), ("POST", "/inference/v1/generate")}, key))
    if of_every_role.spec.role.has_rl_endpoints:
        assert set(found.values()) == {400}  # they want a body
    else:
        assert found == {("POST", "/collective_rpc"): 404, ("POST", "/inference/v1/generate"): 403}


def test_the_client_says_which_roles_have_rl_endpoints(engine, tiny_llama, tiny_engine_config, run):
    async def pause() -> None:
        serve = engine(EngineSpec(model=tiny_llama, role=Role.serve, config=tiny_engine_config))
        async with EngineClient(serve.handle()) as client:
            await client.pause()

    with pytest.raises(EngineError, match="a serve engine has no /pause: only rollout and capture engines do"):
        run(pause())


def test_the_key_is_part_of_the_handle_but_not_of_its_text(of_every_role):
    handle = of_every_role.handle()
    assert handle.key not in repr(handle)
    assert json.loads(handle.model_dump_json())["key"] == handle.key
