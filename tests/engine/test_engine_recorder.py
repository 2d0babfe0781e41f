"""Requests that a real serve engine keeps, and those that it does not."""

import asyncio
import json

import aiohttp

from infra.config.recording import RecordingConfig
from infra.engine import recorder
from infra.engine.client import EngineClient
from infra.engine.launch import start
from infra.engine.spec import EngineSpec, Role
from tasks.drafter import sources

ASKED = [{"role": "user", "content": "What is a fjord?"}]


def test_a_serve_engine_keeps_what_it_was_asked_and_answered(
    tiny_llama, tiny_engine_config, tmp_path, monkeypatch, run
):
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    recording = RecordingConfig(share=1.0)
    spec = EngineSpec(model=tiny_llama, role=Role.serve, config=tiny_engine_config, recording=recording)

    async def ask(engine) -> None:
        body = {"model": engine.spec.model_name, "messages": ASKED, "max_tokens": 2, "stream": True}
        async with EngineClient(engine.handle()) as client, aiohttp.ClientSession(engine.url) as http:
            async with http.post(recorder.PATH, json=body) as stranger:
                assert stranger.status == 401
            headers = {"Authorization": f"Bearer {engine.key}"}
            async with http.post(recorder.PATH, json=body, headers=headers) as streamed:
                assert streamed.status == 200 and (await streamed.read()).endswith(b"[DONE]\n\n")
            async with http.post(recorder.PATH, json=body | {"max_tokens": -1}, headers=headers) as wrong:
                assert wrong.status == 400
            answer = await client.chat([*ASKED, {"role": "assistant", "content": "A bay."}, *ASKED], max_tokens=2)
            assert answer.token_ids
            async with asyncio.timeout(300):  # a request is kept once it has been answered
                while len(list(recorder.recorded())) < 2:
                    await client.metrics()

    with start(spec, tmp_path / "logs") as engine:
        run(ask(engine))
    # whichever was kept first
    assert sorted(len(json.loads(line)["messages"]) for line in recorder.recorded()) == [1, 3]
    texts = sorted(conversation.texts() for conversation in sources.conversations("production"))
    assert texts == [["What is a fjord?"], ["What is a fjord?"] * 2]
