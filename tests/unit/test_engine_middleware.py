"""The key guard as an ASGI application sees it."""

import asyncio

import pytest

from infra.engine.flags import KEY_VARIABLE
from infra.engine.middleware import KeyGuard


@pytest.fixture
def guard(monkeypatch) -> KeyGuard:
    monkeypatch.setenv(KEY_VARIABLE, "right")

    async def app(scope, receive, send) -> None:
        await send({"type": "reached"})

    return KeyGuard(app)


def answers(guard: KeyGuard, **scope) -> list[dict]:
    sent = []

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(guard({"type": "http", "path": "/v1/models", "headers": []} | scope, None, send))
    return sent


def bearer(value: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", value.encode())]


@pytest.mark.parametrize(
    "scope",
    [
        dict(headers=bearer("Bearer right")),
        dict(path="/health"),
        dict(type="lifespan"),
        dict(type="websocket", headers=bearer("Bearer right")),
    ],
)
def test_admitted(guard, scope):
    assert answers(guard, **scope) == [{"type": "reached"}]


@pytest.mark.parametrize(
    "scope",
    [
        {},
        dict(headers=bearer("Bearer wrong")),
        dict(headers=bearer("right")),
        dict(headers=bearer("Bearer ")),
        dict(headers=bearer("Bearer wrong") + bearer("Bearer right")),
        dict(path="/health/../collective_rpc"),
        dict(path="//health"),
        dict(path="/health/"),
        dict(method="OPTIONS"),
    ],
)
def test_refused(guard, scope):
    start, body = answers(guard, **scope)
    assert start["status"] == 401 and b"Authorization: Bearer KEY" in body["body"]


def test_websockets_are_closed(guard):
    (closed,) = answers(guard, type="websocket", path="/health")
    assert closed["type"] == "websocket.close"
