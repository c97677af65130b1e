"""Bodies and clients that mean harm: each gets an answer, and the server takes the next request."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.server.conftest import ANSWER
from tests.server.fake import FakeEngine, Running, running_server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}


def _post(running: Running, path: str, content: bytes) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/{path}", content=content, headers=JSON, timeout=60)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "temperature"])
@pytest.mark.parametrize("digits", ["9" * 4300, "-" + "9" * 4300, "1" + "0" * 6000])
def test_a_number_of_thousands_of_digits_is_refused(
    shared: Running, path: str, name: str, digits: str
) -> None:
    """Python writes no integer of more than 4300 digits, so a message that shows it may fail itself."""
    prompt = '"prompt": "a"' if path == "completions" else '"messages": [{"role": "user", "content": "a"}]'
    answer = _post(shared, path, f'{{{prompt}, "{name}": {digits}}}'.encode())
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "field",
    [
        '"max_tokens": N',
        '"top_k": N',
        '"seed": N',
        '"n": N',
        '"best_of": N',
        '"logprobs": N',
        '"min_p": N',
        '"repetition_penalty": N',
        '"stop_token_ids": [N]',
        '"logit_bias": {"5": N}',
        '"metadata": {"k": N}',
        '"prompt": [N]',
        '"prompt": [[1], [N]]',
        '"prompt": N',
        '"an_unknown_field": N',
    ],
)
@pytest.mark.parametrize("sign", ["", "-"])
def test_no_number_of_thousands_of_digits_makes_the_server_fail(
    shared: Running, field: str, sign: str
) -> None:
    """Wherever it stands it is refused, and the message does not repeat it."""
    content = f'{{"prompt": "a", {field.replace("N", sign + "9" * 4300)}}}'
    answer = _post(shared, "completions", content.encode())
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 1000


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_limit_of_thousands_of_digits_makes_a_chat_fail(shared: Running, name: str) -> None:
    content = json.dumps(CHAT)[:-1] + f', "{name}": {"9" * 4300}}}'
    answer = _post(shared, "chat/completions", content.encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    "name",
    [
        "self",
        "messages",
        "conversations",
        "conversation",
        "tools",
        "tokenize",
        "chat_template",
        "kwargs",
        "bos_token",
    ],
)
def test_template_arguments_that_would_replace_the_server_s_own_are_refused(
    shared: Running, name: str
) -> None:
    """Any name that the call itself uses is a 400 that names the field, never a failure."""
    answer = _post(
        shared, "chat/completions", json.dumps(CHAT | {"chat_template_kwargs": {name: True}}).encode()
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes cost seconds of a core each and hold up everybody's tokenisation."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    lengths: list[int] = []
    encode = tokenizer.encode

    def recorded(text: str, *args: Any, **kwargs: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    with running_server(engine) as running:
        for content in ("ab1 " * 250_000, "😀" * 100_000):
            answer = _post(running, "completions", json.dumps({"prompt": content}).encode())
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not lengths


def test_a_chat_that_cannot_fit_is_refused_before_it_is_tokenised(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is on the rendered text, so many small messages count as well."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    seen: list[str] = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: seen.append(text))
    with running_server(engine) as running:
        for messages in (CHAT["messages"] * 5000, [{"role": "user", "content": "a" * 100_000}]):
            answer = _post(running, "chat/completions", json.dumps({"messages": messages}).encode())
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert not seen


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"prompt":[', b'{"messages":[{"content":['])
def test_deep_json_is_refused(shared: Running, opening: bytes) -> None:
    """Nesting beyond the parser's limit is bad JSON."""
    answer = _post(shared, "completions", opening * 50_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_requests_in_one_packet_are_answered_one_by_one(shared: Running) -> None:
    """Pipelined requests each get their whole answer, in order."""
    host, port = shared.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 200}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall((head.encode() + body) * 3)
        received = b""
        while received.count(b'"usage"') < 3:
            received += connection.recv(65536)
    assert received.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\n\r\n{"pro',
    ],
)
def test_broken_http_disturbs_nobody(shared: Running, sent: bytes) -> None:
    """A connection that talks nonsense or stops talking leaves the next client alone."""
    host, port = shared.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
    answer = _post(shared, "chat/completions", json.dumps(CHAT).encode())
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
