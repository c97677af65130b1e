"""What happens to requests when clients leave, the engine fails, the server is full or is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from nextn.server.app import create_app
from nextn.server.bridge import Bridge
from tests.server.conftest import ANSWER
from tests.server.fake import FakeEngine, Running, running_server, wait_until

_REST = {"query_string": b"", "root_path": "", "http_version": "1.1"}  # what else an ASGI scope has
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def _endless(engine: FakeEngine) -> FakeEngine:
    """An engine whose answers take hours."""
    engine.script = lambda _: [40] * 1_000_000
    engine.max_model_len = 1_000_000
    engine.step_seconds = 0.01
    return engine


def _send(running: Running, body: dict[str, Any]) -> socket.socket:
    """POST a chat over a socket of our own and leave the answer unread."""
    content = json.dumps(body).encode()
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(engine: FakeEngine, stream: bool) -> None:
    with running_server(_endless(engine)) as running:
        connection = _send(running, BODY | {"stream": stream})
        if stream:
            assert b"200 OK" in connection.recv(100)
        wait_until(lambda: engine.steps > 2)
        connection.close()
        wait_until(lambda: len(engine.aborted) == 1)
        assert running.bridge.num_open == 0
        assert engine.aborted == [engine.seen[0].request_id]


def test_a_stream_closed_by_the_openai_client_aborts_its_request(engine: FakeEngine) -> None:
    with (
        running_server(_endless(engine)) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="x") as client,
    ):
        with client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
        ):
            wait_until(lambda: engine.steps > 2)
        wait_until(lambda: len(engine.aborted) == 1)


def test_requests_sent_ahead_are_answered_in_their_order(engine: FakeEngine) -> None:
    """Though the server goes on reading while it makes the first answer."""
    with running_server(engine) as running:
        connection = _send(running, BODY)
        for path in ("/version", "/nothing", "/health/live"):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        connection.settimeout(10)
        received = b""
        while b'{"status":"ok"}' not in received:
            received += connection.recv(65536)
        connection.close()
    places = [
        received.index(part) for part in (b'"choices"', b'{"version"', b"404 Not Found", b'"status":"ok"')
    ]
    assert places == sorted(places)
    assert engine.aborted == []


def test_a_client_that_sends_too_much_behind_its_request_is_disconnected(engine: FakeEngine) -> None:
    """What stands before its end is kept in memory, and so has a bound."""
    with running_server(_endless(engine)) as running:
        connection = _send(running, BODY)
        wait_until(lambda: engine.steps > 2)
        with contextlib.suppress(OSError):
            for _ in range(100):
                connection.sendall(bytes(65536))
        wait_until(lambda: len(engine.aborted) == 1)
        connection.close()


def test_one_client_s_leaving_leaves_the_other_s_answer_alone(engine: FakeEngine) -> None:
    slow = engine.script
    engine.step_seconds = 0.02
    engine.script = lambda request: slow(request) if len(engine.seen) else [40] * 1000
    engine.max_model_len = 2000
    with running_server(engine) as running:
        connection = _send(running, BODY | {"stream": True})
        wait_until(lambda: len(engine.seen) == 1)
        threading.Timer(0.1, connection.close).start()
        answer = httpx.post(running.url + "/v1/chat/completions", json=BODY).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        wait_until(lambda: len(engine.aborted) == 1)


def test_a_full_server_says_429_and_takes_requests_again(engine: FakeEngine) -> None:
    with running_server(_endless(engine), max_open=2) as running:
        connections = [_send(running, BODY | {"stream": True}) for _ in range(2)]
        wait_until(lambda: running.bridge.num_open == 2)
        refused = httpx.post(running.url + "/v1/chat/completions", json=BODY)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        connections[0].close()
        wait_until(lambda: running.bridge.num_open == 1)
        connections.append(_send(running, BODY | {"stream": True}))
        wait_until(lambda: len(engine.seen) == 3)
        for connection in connections:
            connection.close()


def _begin(running: Running, path: str = "/v1/completions") -> socket.socket:
    """Send a request's head and, when the server reads on, the first bytes of its body."""
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 300\r\n"
    connection.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
    connection.sendall(b'{"pro')
    return connection


def _reading(running: Running) -> float | None:
    return running.bridge.metrics.registry.get_sample_value("nextn_requests_reading")


def test_a_request_that_is_being_read_has_its_place_and_gives_it_back(engine: FakeEngine) -> None:
    """Else any number of bodies could come at once and be held in memory."""
    with running_server(engine, max_open=2) as running:
        connections = [_begin(running) for _ in range(2)]
        assert _reading(running) == 2
        refused = httpx.post(running.url + "/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        connections[0].close()
        wait_until(lambda: _reading(running) == 1)
        assert httpx.post(running.url + "/v1/completions", json={"prompt": "a"}).status_code == 200
        connections[1].close()
        wait_until(lambda: _reading(running) == 0)


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (400, b"{", "application/json"),
        (400, b'{"prompt": "a", "n": 3}', "application/json"),
        (413, b'{"prompt": "' + b"a" * 2000, "application/json"),
        (415, b'{"prompt": "a"}', "text/plain"),
        (400, b'{"prompt": [501]}', "application/json"),
        (500, b'{"prompt": "defect"}', "application/json"),
        (200, b'{"prompt": "a"}', "application/json"),
        (200, b'{"prompt": "a", "n": 2, "stream": true}', "application/json"),
        (408, None, "application/json"),
    ],
)
def test_a_place_is_given_back_whatever_comes_of_the_request(
    engine: FakeEngine, status: int, content: bytes | None, kind: str
) -> None:
    check = engine.check

    def checked(tokens: list[int], params: Any) -> None:
        if engine.tokenizer is not None and engine.tokenizer.decode(tokens).endswith("defect"):
            raise ZeroDivisionError("a defect")
        check(tokens, params)

    engine.check = checked  # type: ignore[method-assign]
    with running_server(engine, max_open=2, max_body_bytes=1000, body_seconds=0.2) as running:
        if content is None:
            with _begin(running) as connection:
                assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
        else:
            answer = httpx.post(
                running.url + "/v1/completions", content=content, headers={"content-type": kind}
            )
            assert answer.status_code == status
        wait_until(lambda: (_reading(running), running.bridge.num_open) == (0, 0))
        both = httpx.post(running.url + "/v1/completions", json={"prompt": "a", "n": 2})
        assert both.status_code == 200


@pytest.mark.parametrize(("path", "work"), [("/tokenize", "encode"), ("/detokenize", "decode")])
def test_texts_that_are_tokenized_at_once_are_bounded(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, work: str
) -> None:
    """One that is still being read counts; completions do not wait for them."""
    monkeypatch.setattr("nextn.server.app.MAX_TOKENIZING", 2)
    entered, release = threading.Event(), threading.Event()
    engine.script = lambda _: [40]
    assert engine.tokenizer is not None
    original = getattr(engine.tokenizer, work)

    def held(*args: Any, **options: Any) -> Any:
        entered.set()
        assert release.wait(20)
        return original(*args, **options)

    monkeypatch.setattr(engine.tokenizer, work, held)
    body = {"prompt": "a"} if work == "encode" else {"tokens": [40]}
    with running_server(engine) as running:
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(running.url + path, json=body, timeout=60).status_code)
        )
        asking.start()
        assert entered.wait(20)
        half = _begin(running, path)
        refused = httpx.post(running.url + path, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        tokens = {"prompt": [40], "max_tokens": 1}
        if work == "encode":  # which these need not
            assert httpx.post(running.url + "/v1/completions", json=tokens).status_code == 200
        half.close()
        release.set()
        asking.join(20)
        assert answers == [200]
        wait_until(lambda: httpx.post(running.url + path, json=body).status_code == 200)


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}])
def test_several_answers_count_as_several_requests(engine: FakeEngine, body: dict[str, Any]) -> None:
    with running_server(_endless(engine), max_open=2) as running:
        connection = _send(running, BODY | {"stream": True})
        wait_until(lambda: running.bridge.num_open == 1)
        assert httpx.post(running.url + "/v1/completions", json=body).status_code == 429
        connection.close()
        wait_until(lambda: running.bridge.num_open == 0)
        assert httpx.post(running.url + "/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": ["a", "b", "c"]}, "prompt"), ({"prompt": ["a", "b"], "n": 2}, "n")]
)
def test_more_answers_than_the_server_ever_gives_at_once_are_refused_for_good(
    engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    """Not with 429: a client would try again and again."""
    with running_server(engine, max_open=2) as running:
        refused = httpx.post(running.url + "/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_failing_engine_ends_every_request_with_an_error(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Streamed or not: an error each; /health is 503; the traceback is logged; the server ends by itself."""
    engine.step_seconds = 0.05
    engine.script = lambda _: [40] * 100
    engine.fail_at = 8
    ended = threading.Event()
    with running_server(engine) as running, caplog.at_level(logging.CRITICAL, "nextn.server.bridge"):
        running.bridge.on_failure = ended.set  # keep the server up, to look at it
        stream = _send(running, BODY | {"stream": True})
        wait_until(lambda: len(engine.seen) == 1)
        whole = httpx.post(running.url + "/v1/chat/completions", json=BODY)
        assert whole.status_code == 500
        assert whole.json()["error"]["type"] == "server_error"
        assert ended.is_set()
        stream.settimeout(10)
        received = b""
        while b"0\r\n\r\n" not in received:
            received += stream.recv(65536)
        stream.close()
        events = [line for line in received.decode().splitlines() if line.startswith("data: ")]
        assert "engine has failed" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        assert "[DONE]" not in received.decode()
        health = httpx.get(running.url + "/health")
        assert (health.status_code, health.json()) == (503, {"status": "engine failed"})
        later = httpx.post(running.url + "/v1/chat/completions", json=BODY)
        assert later.status_code == 503
        assert running.bridge.num_open == 0
    assert isinstance(running.bridge.failure, RuntimeError)
    assert "the device is on fire" in caplog.text


def test_the_openai_client_raises_on_an_error_in_a_stream(engine: FakeEngine) -> None:
    engine.script = lambda _: [40] * 100
    engine.fail_at = 4
    with running_server(engine) as running:
        running.bridge.on_failure = None
        with openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            with pytest.raises(openai.APIError, match="engine has failed"):
                list(stream)


def test_a_request_that_the_engine_forgets_is_an_engine_failure(engine: FakeEngine) -> None:
    """Every request gets its end, even from an engine that never sends one."""
    engine.script = lambda _: [40] * 10
    engine.step = lambda: engine._open.clear() or []  # type: ignore[method-assign,func-returns-value]
    with running_server(engine) as running:
        running.bridge.on_failure = None
        assert httpx.post(running.url + "/v1/chat/completions", json=BODY).status_code == 500
        assert "has not ended" in str(running.bridge.failure)


def test_the_end_of_the_server_gives_open_requests_time_and_then_ends_them(engine: FakeEngine) -> None:
    with running_server(_endless(engine), shutdown_timeout=0.3) as running:
        connection = _send(running, BODY | {"stream": True})
        wait_until(lambda: engine.steps > 2)
        started = time.monotonic()
        running.server.end()
        wait_until(lambda: engine.closed)
        assert time.monotonic() - started >= 0.3
        connection.settimeout(10)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        connection.close()
    assert b"the server is shutting down" in received


def test_a_request_that_the_end_of_the_server_cuts_off_is_unavailable(engine: FakeEngine) -> None:
    with running_server(_endless(engine), shutdown_timeout=0.05) as running:
        connection = _send(running, BODY)
        wait_until(lambda: engine.steps > 2)
        running.server.end()
        connection.settimeout(10)
        assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")
        connection.close()


def test_a_short_answer_is_finished_before_the_server_ends(engine: FakeEngine) -> None:
    engine.step_seconds = 0.02
    with running_server(engine) as running:
        connection = _send(running, BODY)
        wait_until(lambda: len(engine.seen) == 1)
        running.server.end()
        connection.settimeout(10)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        connection.close()
    assert b"200 OK" in received
    assert b'"finish_reason":"stop"' in received
    assert engine.aborted == []


def test_a_request_that_is_cancelled_as_the_server_ends_is_unavailable(engine: FakeEngine) -> None:
    """One whose text is still being tokenised, say; the application does not raise, so nothing is logged."""
    entered, leave = threading.Event(), threading.Event()
    engine.check = lambda *_: entered.set() or leave.wait(20)  # type: ignore[method-assign,assignment]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}

    async def cut_off() -> None:
        bridge = Bridge(engine, max_open=1)
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        bridge.start()
        answering = asyncio.ensure_future(create_app(bridge, ["fake"])(scope | _REST, receive, send))
        assert await asyncio.to_thread(entered.wait, 20)
        await bridge.stop()
        answering.cancel()
        leave.set()
        await answering

    asyncio.run(cut_off())
    assert sent[0]["status"] == 503


def test_only_the_engine_thread_touches_the_engine(engine: FakeEngine) -> None:
    with running_server(engine) as running:
        for _ in range(3):
            assert httpx.post(running.url + "/v1/chat/completions", json=BODY).status_code == 200
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_an_idle_engine_is_left_alone(engine: FakeEngine) -> None:
    """Neither stepped nor asked again and again."""
    with running_server(engine) as running:
        assert httpx.post(running.url + "/v1/chat/completions", json=BODY).status_code == 200
        time.sleep(0.05)
        steps, looks = engine.steps, engine.looks
        time.sleep(0.1)
        assert engine.steps == steps
        assert engine.looks <= looks + 2
