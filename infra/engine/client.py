"""Talk to an engine from asyncio: tokens in, tokens out, and the RL endpoints."""

import contextlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import aiohttp

from infra.engine.answers import ChatAnswer, Generation, ScoredToken, SpeculationCounters
from infra.engine.errors import EngineError, EngineGone
from infra.engine.metrics import parse
from infra.engine.spec import EngineHandle

_NOT_FINITE = -9999.0  # what vLLM sends for a log-prob that is -inf or NaN


class EngineClient:
    """One engine, any number of requests in flight. Use as an async context manager; every method raises EngineGone
    when nobody answers any more and EngineError when the engine refuses.
    """

    def __init__(
        self, handle: EngineHandle, timeout_s: float = 3600.0, headers: Mapping[str, str] | None = None
    ) -> None:
        """timeout_s: longest wait for any one answer, queueing included. headers: sent with every request."""
        self.handle = handle
        self._headers = {"Authorization": f"Bearer {handle.key}", **(headers or {})}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "EngineClient":
        self._session = aiohttp.ClientSession(
            self.handle.url,
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=self._timeout,
        )
        return self

    async def __aexit__(self, *_) -> None:
        await self._session.close()

    # Generation

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        ignore_eos: bool = False,
        logprobs: bool = True,
        kv_transfer_params: dict | None = None,
    ) -> Generation:
        """Continue `prompt_ids`. top_k 0 keeps every token; without a seed the engine's own generator samples.

        logprobs: whether the answer has them. They are half of what the server does for a token.
        """
        sampling = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "ignore_eos": ignore_eos,
        }
        if logprobs:
            sampling["logprobs"] = 0  # of the token itself, and none beside it
        if self.handle.role.has_rl_endpoints:
            body = {"token_ids": prompt_ids, "sampling_params": sampling | {"detokenize": False}}
            if kv_transfer_params:
                body["kv_transfer_params"] = kv_transfer_params
            answer = await self._post("/inference/v1/generate", body)
            return _from_tokens_api(prompt_ids, answer)
        body = {"model": self.handle.model, "prompt": prompt_ids, "return_token_ids": True} | sampling
        return _from_completions_api(prompt_ids, await self._post("/v1/completions", body))

    async def stream(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        ignore_eos: bool = False,
    ) -> AsyncIterator[list[int]]:
        """Continue `prompt_ids` as `generate` does; yields tokens as they arrive, those of one engine step together."""
        body = {"model": self.handle.model, "prompt": prompt_ids, "return_token_ids": True, "stream": True}
        body |= {"max_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        body |= {"seed": seed, "ignore_eos": ignore_eos}
        with _telling_where(self.handle.url):
            async with self._session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    _refuse(self.handle.url, "/v1/completions", response.status, await response.read())
                async for line in response.content:
                    event = line.removeprefix(b"data:").strip()
                    if not event or event == b"[DONE]":
                        continue
                    chunk = json.loads(event)
                    if "error" in chunk:  # the engine failed after it had answered 200
                        _refuse(self.handle.url, "/v1/completions", chunk["error"].get("code"), event)
                    if tokens := chunk["choices"][0]["token_ids"]:
                        yield tokens

    async def score(self, token_ids: list[int], top_k: int) -> list[ScoredToken]:
        """Log-probs of a text's own tokens, from the second on (the first has none), and the `top_k` most likely
        tokens at each position."""
        body = {"model": self.handle.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0.0}
        answer = await self._post("/v1/completions", body | {"prompt_logprobs": top_k})
        positions = answer["choices"][0]["prompt_logprobs"]
        return [
            _scored(token, {int(i): entry["logprob"] for i, entry in position.items()})
            for token, position in zip(token_ids[1:], positions[1:], strict=True)
        ]

    async def chat(self, messages: list[dict[str, str]], **sampling: Any) -> ChatAnswer:
        """Answer a conversation through the model's chat template.

        sampling: fields of OpenAI's chat endpoint, such as `max_tokens`, `temperature`, `seed`.
        """
        body = {"model": self.handle.model, "messages": messages, "return_token_ids": True} | sampling
        answer = await self._post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        return ChatAnswer(
            choice["message"]["content"], choice["finish_reason"], answer["prompt_token_ids"], choice["token_ids"]
        )

    async def capture(self, prompt_ids: list[int], **generation: Any) -> Generation:
        """Generate and keep the hidden states of the prompt and of all generated tokens but the last.

        generation: arguments of `generate`, whose answer has no log-probs here. The file comes when the engine reads
        on, or after `flush_captures`.
        """
        kept = {"include_output_tokens": True}
        return await self.generate(prompt_ids, kv_transfer_params=kept, logprobs=False, **generation)

    async def flush_captures(self) -> None:
        """Let the engine write the files of all finished requests: it does so one step late, so it is given a step."""
        await self.generate([0], max_new_tokens=1, temperature=0.0, ignore_eos=True, logprobs=False)

    # Counters

    async def metrics(self) -> dict[str, float]:
        """The engine's Prometheus samples: name, with labels in braces where they tell samples apart, to value."""
        return parse(await self._send("GET", "/metrics"))

    async def is_healthy(self) -> bool:
        """Whether the engine behind the server works, as far as the server knows."""
        with _telling_where(self.handle.url):
            async with self._session.get("/health") as response:
                return response.status == 200

    async def speculation(self) -> SpeculationCounters:
        """Drafts and acceptances so far; zeros without speculation."""
        samples = await self.metrics()
        prefix = "vllm:spec_decode_num_"
        per_position = {}
        for name, value in samples.items():
            if name.startswith(f"{prefix}accepted_tokens_per_pos_total{{"):
                per_position[int(name.split('position="')[1].split('"')[0])] = int(value)
        return SpeculationCounters(
            *(int(samples.get(f"{prefix}{n}_total", 0)) for n in ("drafts", "draft_tokens", "accepted_tokens")),
            tuple(per_position[i] for i in sorted(per_position)),
        )

    # RL endpoints

    async def pause(self, in_flight: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop scheduling. Requests in flight are kept for `resume`, waited for, or aborted."""
        await self._control("POST", f"/pause?mode={in_flight}&clear_cache=false")

    async def resume(self) -> None:
        await self._control("POST", "/resume")

    async def is_paused(self) -> bool:
        return (await self._control("GET", "/is_paused"))["is_paused"]

    async def abort(self) -> int:
        """Abort all requests in flight; how many there were. They end with the tokens they have."""
        return (await self._control("POST", "/abort_requests", {}))["aborted"]

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, those of requests in flight included (they are computed anew)."""
        answer = await self._control("POST", "/reset_prefix_cache?reset_running_requests=true")
        if not answer["success"]:
            raise EngineError(
                f"the engine at {self.handle.url} could not reset its prefix cache: blocks are still held"
            )

    async def sleep(self, level: int = 1) -> None:
        """Free GPU memory (1: weights to host memory; 2: weights dropped), and what is kept there for updates of them.
        On CPU, where vLLM accepts this and frees nothing, raises EngineError."""
        if not self.handle.accelerated:
            raise EngineError("an engine on CPU cannot sleep: pause it, or stop it to free its memory")
        await self.collective_rpc("rest_weight_transfer")
        await self._control("POST", f"/sleep?level={level}")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._control("POST", "/wake_up" + ("?" + "&".join(f"tags={tag}" for tag in tags) if tags else ""))

    async def is_sleeping(self) -> bool:
        return (await self._control("GET", "/is_sleeping"))["is_sleeping"]

    async def init_weight_transfer(self, init_info: dict) -> None:
        await self._control("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def start_weight_update(self, draft: bool = False) -> None:
        """Begin an update of the target's weights, or of the drafter's."""
        await self._control("POST", "/start_draft_weight_update" if draft else "/start_weight_update")

    async def update_weights(self, update_info: dict) -> None:
        await self._control("POST", "/update_weights", {"update_info": update_info})

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update; tokens sampled from here on carry `weight_version`."""
        await self._control("POST", "/finish_weight_update", {"weight_version": weight_version})

    async def weight_version(self) -> str:
        return (await self._control("GET", "/weight_info"))["weight_version"]

    async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker with JSON arguments; each worker's answer (a list or dict, else a string)."""
        answer = await self._control("POST", "/collective_rpc", {"method": method, "kwargs": kwargs})
        return answer.get("results", [])

    # Transport

    async def _control(self, method: str, path: str, body: dict | None = None) -> dict:
        if not self.handle.role.has_rl_endpoints:
            endpoint = path.split("?")[0]
            raise EngineError(f"a {self.handle.role} engine has no {endpoint}: only rollout and capture engines do")
        text = await self._send(method, path, body)
        return json.loads(text) if text else {}

    async def _post(self, path: str, body: dict) -> dict:
        return json.loads(await self._send("POST", path, body))

    async def _send(self, method: str, path: str, body: dict | None = None) -> bytes:
        with _telling_where(self.handle.url):
            async with self._session.request(method, path, json=body) as response:
                text = await response.read()
        if response.status != 200:
            _refuse(self.handle.url, path.split("?")[0], response.status, text)
        return text


@contextlib.contextmanager
def _telling_where(url: str):
    try:
        yield
    except aiohttp.ClientConnectionError as error:
        raise EngineGone(
            f"the engine at {url} does not answer ({error}): it has died or was stopped, see its log"
        ) from error
    except TimeoutError as error:
        raise EngineError(
            f"the engine at {url} gave no answer in time: it is overloaded or stuck, see its log"
        ) from error


def _refuse(url: str, path: str, status: int, text: bytes) -> NoReturn:
    raise EngineError(f"{url}{path} answered {status}: {_reason(text)}")


def _reason(text: bytes) -> str:
    """The message in vLLM's several shapes of error bodies."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.decode(errors="replace").strip()
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _finite(logprob: float | None) -> float:
    return -math.inf if logprob is None or logprob <= _NOT_FINITE else logprob


def _from_tokens_api(prompt_ids: list[int], answer: dict) -> Generation:
    choice = answer["choices"][0]
    path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
    return Generation(
        prompt_ids,
        choice["token_ids"],
        [_finite(entry["logprob"]) for entry in (choice["logprobs"] or {"content": []})["content"]],
        choice["finish_reason"],
        [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []],
        Path(path) if path else None,
    )


def _from_completions_api(prompt_ids: list[int], answer: dict) -> Generation:
    choice = answer["choices"][0]
    logprobs = [_finite(value) for value in (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]]
    return Generation(prompt_ids, choice["token_ids"], logprobs, choice["finish_reason"])


def _scored(token: int, top: dict[int, float]) -> ScoredToken:
    return ScoredToken(token, top[token], top)
