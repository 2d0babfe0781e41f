"""Who asks the Prefect server through a client that has never reached it waits where a keeper brings it back."""

import http.server
import os
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from infra.services.patience import patiently
from infra.services.record import Record


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()


@pytest.fixture
def place(monkeypatch, tmp_path) -> Iterator[socket.socket]:
    """Has a port, at which nobody answers yet and that nobody else gets, in a home without services."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def get(place: socket.socket) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{place.getsockname()[1]}", timeout=600)


def test_a_server_that_is_away_is_waited_for_where_a_keeper_starts_it_again(place):
    Record(name="keeper", pid=os.getpid(), started=0.0, token="", log=os.devnull).write()
    servers = []

    def ask() -> int:
        try:
            return get(place).status_code
        except httpx.ConnectError:
            if not servers:
                servers.append(http.server.HTTPServer(place.getsockname(), Answer, bind_and_activate=False))
                servers[0].socket.close()
                servers[0].socket = place
                servers[0].server_activate()
                threading.Thread(target=servers[0].serve_forever, daemon=True).start()
            raise

    try:
        assert patiently(ask) == 204
        assert servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_where_nobody_starts_it_again_it_is_said_at_once(place):
    asked = []

    def ask() -> None:
        asked.append(1)
        get(place)

    with pytest.raises(httpx.ConnectError):
        patiently(ask)
    assert asked == [1]
