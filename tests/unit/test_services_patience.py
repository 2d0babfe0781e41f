"""Who asks the Prefect server through a client that has never reached it waits where a keeper brings it back."""

import http.server
import os
import socket
import threading

import httpx
import pytest

from infra.services.patience import patiently
from infra.services.record import Record


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()


@pytest.fixture
def port(monkeypatch, tmp_path) -> int:
    """Of nobody, in a home without services."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_server_that_is_away_is_waited_for_where_a_keeper_starts_it_again(port):
    Record(name="keeper", pid=os.getpid(), started=0.0, token="", log=os.devnull).write()
    servers = []

    def ask() -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{port}").status_code
        except httpx.ConnectError:
            if not servers:
                servers.append(http.server.HTTPServer(("127.0.0.1", port), Answer))
                threading.Thread(target=servers[0].serve_forever, daemon=True).start()
            raise

    try:
        assert patiently(ask) == 204
        assert servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_where_nobody_starts_it_again_it_is_said_at_once(port):
    asked = []

    def ask() -> None:
        asked.append(1)
        httpx.get(f"http://127.0.0.1:{port}")

    with pytest.raises(httpx.ConnectError):
        patiently(ask)
    assert asked == [1]
