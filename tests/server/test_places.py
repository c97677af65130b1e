"""Places of requests that are being read: honest clients are served while others trickle their bodies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

import httpx
import pytest

from nextn.server import app, places
from nextn.server.places import Places
from tests.server.fake import FakeEngine, Running, running_server, wait_until


class _Full(Exception):
    pass


def _places(most: int) -> Places:
    def check(count: int) -> None:
        kept.make_room(kept.reserved + count - most)
        if kept.reserved + count > most:
            raise _Full

    kept = Places(check)
    return kept


@contextlib.contextmanager
def _trickling(running: Running, count: int, path: str) -> Iterator[list[socket.socket]]:
    """Clients that have sent their heads and the first byte of a body."""
    host, port = running.url.removeprefix("http://").split(":")
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        "Content-Length: 99",
        "",
        "{",
    )
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            client.sendall("\r\n".join(lines).encode())
            clients.append(client)
        yield clients


def _reading(running: Running) -> int:
    return running.bridge.places.reserved


def test_the_oldest_slow_bodies_give_way_and_just_as_many_as_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose body is there, and whoever has not taken long yet, keep their places."""
    clock = [0.0]
    monkeypatch.setattr("nextn.server.places.time.monotonic", lambda: clock[0])
    kept = _places(4)
    with kept.reserve() as first, kept.reserve() as read, kept.reserve() as second:
        read.has_body()
        clock[0] = places.GRACE_SECONDS + 1
        with kept.reserve() as late:
            with pytest.raises(_Full), kept.reserve() as place:
                place.keep(3)  # two are slow, so it would take one in vain
            assert [each.lost.is_set() for each in (first, read, second, late)] == [True, False, False, False]
            with kept.reserve():
                assert kept.reserved == 4
            with kept.reserve(), kept.reserve():
                assert kept.reserved == 4
            assert [each.lost.is_set() for each in (first, read, second, late)] == [True, False, True, False]
            with pytest.raises(_Full), kept.reserve(), kept.reserve(), kept.reserve():
                pass
    assert kept.reserved == 0
    assert not kept.reading


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_clients_are_served_while_others_trickle_their_bodies(
    path: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the place of the one that has been sending for the longest, which is told so."""
    monkeypatch.setattr(places, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(app, "MAX_TOKENIZING", 3)
    body = {"model": "fake", "prompt": "x"}
    with running_server(engine, max_open=3) as running, _trickling(running, 3, path) as clients:
        wait_until(lambda: httpx.post(running.url + path, json=body).status_code == 200)
        assert [httpx.post(running.url + path, json=body).status_code for _ in range(5)] == [200] * 5
        answers = _answers(clients[:1])
        assert answers[0].startswith(b"HTTP/1.1 408 ")
        assert b"others needed its place" in answers[0]
    wait_until(lambda: _reading(running) == 0)


def _answers(clients: Sequence[socket.socket]) -> list[bytes]:
    """All that each client is sent until its connection is closed."""
    return [b"".join(iter(lambda client=client: client.recv(65536), b"")) for client in clients]


def test_a_body_that_comes_in_time_keeps_its_place_in_a_full_server(engine: FakeEngine) -> None:
    """Who comes later is turned away, as without slow senders."""
    with running_server(engine, max_open=2) as running, _trickling(running, 2, "/v1/completions"):
        wait_until(lambda: _reading(running) == 2)
        body = {"model": "fake", "prompt": "x", "max_tokens": 2}
        assert httpx.post(running.url + "/v1/completions", json=body).status_code == 429
        assert _reading(running) == 2


def test_a_storm_of_slow_senders_ends_every_request_once(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are places, coming and going while others are served."""
    monkeypatch.setattr(places, "GRACE_SECONDS", 0.0)
    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
    statuses: list[int] = []
    with running_server(engine, max_open=4) as running:

        def serve() -> None:
            url = running.url + "/v1/completions"
            statuses.extend(httpx.post(url, json=body).status_code for _ in range(15))

        with _trickling(running, 30, "/v1/completions"):
            threads = [threading.Thread(target=serve) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        wait_until(lambda: _reading(running) == 0 and running.bridge.num_open == 0)
    assert statuses == [200] * 30
