"""What stands between an engine and those who ask it. Loaded by vLLM's `--middleware`."""

import hmac
import os

from infra.engine.flags import KEY_VARIABLE, LABEL_VARIABLE


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


class FirstByte:
    """ASGI middleware: status and headers leave with the first byte of the body, and say what is served.

    vLLM sends the head of a stream before it has a token. Once a proxy has passed it on, the request cannot be tried
    elsewhere any more, although its client has nothing yet.
    """

    def __init__(self, app) -> None:
        self.app = app
        self._label = os.environ.get(LABEL_VARIABLE, "").encode()

    async def __call__(self, scope, receive, send) -> None:
        head = None

        async def later(message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                labelled = [(b"x-lockstep-serves", self._label)] if self._label else []
                head = message | {"headers": [*message.get("headers", ()), *labelled]}
                return
            if head is not None and (message.get("body") or not message.get("more_body", False)):
                held, head = head, None
                await send(held)
            if head is None:
                await send(message)

        await self.app(scope, receive, later if scope["type"] == "http" else send)
