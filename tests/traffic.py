"""Clients of the stable address: a steady load of streams and plain requests, and what became of each."""

import asyncio
import json
import threading
from collections import Counter

import aiohttp


class Load:
    """`concurrency` clients that ask one request after the other, streams and plain ones in turn, while it is open.

    answered: complete answers by what served them (`x-lockstep-serves`). cut: streams that had a first byte and ended
    with an error. failed: every other end, in words.
    """

    def __init__(self, url: str, model: str, *, concurrency: int, max_tokens: int = 24) -> None:
        self.answered: Counter[str] = Counter()
        self.cut = 0
        self.failed: list[str] = []
        self._url, self._concurrency = url, concurrency
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def total(self) -> int:
        """Requests that have ended."""
        return sum(self.answered.values()) + self.cut + len(self.failed)

    def wait_for(self, more: int) -> None:
        """Return when `more` further requests have ended. Raises TimeoutError after ten minutes."""
        goal, waited = self.total + more, 0.0
        while self.total < goal:
            if waited > 600:
                raise TimeoutError(f"{goal - self.total} of {more} requests have not ended: {self.failed[:3]}")
            self._stop.wait(0.05)
            waited += 0.05

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=900)
        async with aiohttp.ClientSession(self._url, timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, i) for i in range(self._concurrency)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            prompt = f"client {number} asks question {count}"
            await (self._stream if (number + count) % 2 else self._plain)(session, {"prompt": prompt, **self._body})

    async def _plain(self, session: aiohttp.ClientSession, body: dict) -> None:
        try:
            async with session.post("/v1/completions", json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed.append(repr(error))
            return
        if response.status == 200 and json.loads(answer)["choices"][0]["finish_reason"] == "length":
            self.answered[response.headers["x-lockstep-serves"]] += 1
        else:
            self.failed.append(f"{response.status} {answer[:200]}")

    async def _stream(self, session: aiohttp.ClientSession, body: dict) -> None:
        got = b""
        try:
            async with session.post("/v1/completions", json=body | {"stream": True}) as response:
                async for some in response.content.iter_any():
                    got += some
        except (aiohttp.ClientError, TimeoutError) as error:
            if got:
                self.cut += 1
            else:
                self.failed.append(repr(error))
            return
        if response.status == 200 and got.endswith(b"data: [DONE]\n\n") and b'"error"' not in got:
            self.answered[response.headers["x-lockstep-serves"]] += 1
        elif b'"error"' in got and response.status == 200:
            self.cut += 1  # the server outlived its engine and said so
        else:
            self.failed.append(f"{response.status} {got[-200:]}")
