"""What a serve engine keeps of the requests it answers."""

import asyncio
import json
import os
import sys

import pytest

from infra.config.recording import RecordingConfig
from infra.engine import recorder
from infra.engine.flags import arguments
from infra.engine.spec import EngineSpec, Role
from tasks.drafter import sources

BODY = {"model": "m", "messages": [{"role": "user", "content": "my code is 1234"}], "user": "someone", "stream": True}


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """`ask(config)(**request)`: send a request through a recorder that starts with that configuration."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))

    def recording(**settings):
        monkeypatch.setenv(recorder.VARIABLE, RecordingConfig(**{"share": 1.0} | settings).model_dump_json())
        heard = []

        async def app(scope, receive, send):
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message["body"], message["more_body"]
            heard.append(body)
            await send({"type": "http.response.start", "status": scope["status"]})
            await send({"type": "http.response.body", "body": b"ok"})

        middleware = recorder.RequestRecorder(app)

        def request(body=BODY, path=recorder.PATH, status=200):
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            parts = [raw[:10], raw[10:]]
            messages = [{"type": "http.request", "body": p, "more_body": p is parts[0]} for p in parts]
            sent = []

            async def receive():
                return messages.pop(0)

            async def send(message):
                sent.append(message)

            asyncio.run(middleware({"type": "http", "path": path, "status": status}, receive, send))
            assert heard.pop() == raw and sent[0]["status"] == status, "the request passes through as it was"

        return request

    return recording


def kept() -> list[dict]:
    return [json.loads(line) for line in recorder.recorded()]


def test_messages_and_tools_are_kept_and_become_traffic(ask, tmp_path):
    request = ask()
    request(BODY | {"tools": [{"type": "function", "function": {"name": "f"}}]})
    request(path="/v1/completions")
    request(status=400)
    (line,) = kept()
    assert line == {"messages": BODY["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]}
    (conversation,) = sources.conversations("production")
    assert conversation.texts() == ["my code is 1234"] and conversation.tools == line["tools"]
    (file,) = recorder.folder().glob("*.jsonl")
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_is_not_plain_text_is_passed_over_as_traffic(ask):
    request = ask()
    request({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    request({"messages": [{"role": "assistant", "content": "Hello!"}]})
    assert len(kept()) == 2 and sources.conversations("production") == []


def test_the_hook_decides_what_is_kept(ask, tmp_path, monkeypatch):
    (tmp_path / "redaction.py").write_text(
        "def digits(kept):\n"
        "    text = kept['messages'][0]['content']\n"
        "    if 'secret' in text:\n"
        "        return None\n"
        "    if 'fail' in text:\n"
        "        raise RuntimeError('hook')\n"
        "    return {'messages': [{'role': 'user', 'content': ''.join(c for c in text if not c.isdigit())}]}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    request = ask(redact="redaction:digits")
    for text in ("a secret", "fail", "my code is 1234"):
        request(BODY | {"messages": [{"role": "user", "content": text}]})
    assert [k["messages"][0]["content"] for k in kept()] == ["my code is "]
    sys.modules.pop("redaction")
    with pytest.raises(ValueError, match="release.recording.redact = 'nowhere:f' is no importable"):
        ask(redact="nowhere:f")


def test_sample_rate_and_budget_bound_what_is_kept(ask):
    ask(share=0.0)()
    assert kept() == []
    request = ask(per_minute=2)
    for _ in range(5):
        request()
    assert len(kept()) == 2
    request = ask(budget_mib=1)
    request({"messages": [{"role": "user", "content": "x" * (recorder.LONGEST - 60)}]})
    for _ in range(3):
        request({"messages": [{"role": "user", "content": "y" * 100}]})
    assert len(kept()) == 3, "the long one has filled the budget"


def test_a_huge_request_is_not_kept(ask):
    ask()({"messages": [{"role": "user", "content": "x" * recorder.LONGEST}]})
    assert kept() == []


def test_old_requests_are_removed(ask):
    ask()()
    (file,) = recorder.folder().glob("*.jsonl")
    os.utime(file, (0, 0))
    ask(retention_days=30)
    assert not file.exists()


def test_engines_record_only_when_asked_to_and_only_those_that_serve(tiny_llama):
    on = RecordingConfig(share=0.1)
    flag = "--middleware=infra.engine.recorder.RequestRecorder"
    assert flag not in arguments(EngineSpec(model=tiny_llama, role=Role.serve))
    assert flag in arguments(EngineSpec(model=tiny_llama, role=Role.serve, recording=on))
    with pytest.raises(ValueError, match="only a serve engine"):
        EngineSpec(model=tiny_llama, role=Role.eval, recording=on)
