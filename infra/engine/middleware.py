"""The key in front of every path of an engine. Loaded by vLLM's `--middleware`."""

import hmac
import os

from infra.engine.flags import KEY_VARIABLE


class KeyGuard:
    """ASGI middleware: answers 401 to any HTTP request or websocket without `Authorization: Bearer KEY`, except
    `/health`."""

    def __init__(self, app) -> None:
        self.app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan" or self._admits(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "the engine's key is missing or wrong"})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = b'{"error": "the engine\'s key is missing or wrong: send it as Authorization: Bearer KEY"}'
            await send({"type": "http.response.body", "body": body})

    def _admits(self, scope) -> bool:
        if scope["type"] == "http" and scope["path"] == "/health":
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
