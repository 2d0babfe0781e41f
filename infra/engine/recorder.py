"""Requests that a serve engine keeps as traffic for drafters. Loaded by vLLM's `--middleware`; off by default.

A kept request is a JSON line `{"messages": [...], "tools": [...]}` in `home()/requests/DAY-PID.jsonl`, readable by its
owner alone: nothing else of a request is kept, and nothing of its answer.
"""

import asyncio
import importlib
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra.config.recording import RecordingConfig
from infra.services.home import home

VARIABLE = "LOCKSTEP_ENGINE_RECORDING"
PATH = "/v1/chat/completions"
LONGEST = 2**20  # bytes of a request that is kept
DAY_S = 86400

_log = logging.getLogger(__name__)


class RequestRecorder:
    """ASGI middleware: passes everything on, and keeps a sample of the chat requests that were answered with 200.

    Reads its RecordingConfig as JSON from `VARIABLE`. Raises ValueError, so that the engine does not start, when the
    redaction hook cannot be imported. A request never fails because it could not be kept: the log says so.
    """

    def __init__(self, app) -> None:
        self.app = app
        self.config = RecordingConfig.model_validate_json(os.environ[VARIABLE])
        self.redact = hook(self.config.redact)
        self.folder = folder()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._rng = random.Random()
        self._tokens, self._filled = float(self.config.per_minute), time.monotonic()
        expire(self.folder, self.config.retention_days)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or not self._chosen():
            return await self.app(scope, receive, send)
        parts, size, status = [], 0, 0

        async def listen():
            nonlocal size
            message = await receive()
            if message["type"] == "http.request" and size <= LONGEST:
                parts.append(message.get("body", b""))
                size += len(parts[-1])
            return message

        async def tell(message):
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self.app(scope, listen, tell)
        if status == 200 and size <= LONGEST:
            await asyncio.to_thread(self._keep, b"".join(parts))

    def _chosen(self) -> bool:
        """Sampled, and inside the rate: a bucket that fills with `per_minute` and holds a minute's worth."""
        now, limit = time.monotonic(), self.config.per_minute
        self._tokens = min(limit, self._tokens + (now - self._filled) * limit / 60)
        self._filled = now
        if self._tokens < 1 or self._rng.random() >= self.config.share:
            return False
        self._tokens -= 1
        return True

    def _keep(self, body: bytes) -> None:
        try:
            request = json.loads(body)
            kept = {key: request[key] for key in ("messages", "tools") if request.get(key)}
            if self.redact:
                kept = self.redact(kept)
            if kept is None:
                return
            expire(self.folder, self.config.retention_days)
            if sum(p.stat().st_size for p in self.folder.glob("*.jsonl")) >= self.config.budget_mib * 2**20:
                return
            path = self.folder / f"{time.strftime('%Y-%m-%d', time.gmtime())}-{os.getpid()}.jsonl"
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, json.dumps(kept).encode() + b"\n")
            finally:
                os.close(file)
        except Exception:  # the hook is the user's, the disk may be full: the request has been answered all the same
            _log.exception("a request was not kept")


def hook(name: str) -> Callable[[dict[str, Any]], dict[str, Any] | None] | None:
    """The function `module:function`, or None for no name. Raises ValueError when there is none."""
    if not name:
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"release.recording.redact = {name!r} is no importable module:function ({error})") from error


def expire(folder: Path, days: float) -> None:
    """Remove files whose last request is older than `days`."""
    oldest = time.time() - days * DAY_S
    for path in folder.glob("*.jsonl"):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def folder() -> Path:
    """Where serve engines keep requests."""
    return home() / "requests"


def recorded() -> Iterator[str]:
    """Lines of all kept requests, oldest file first."""
    for path in sorted(folder().glob("*.jsonl")):
        yield from path.read_text().splitlines()
