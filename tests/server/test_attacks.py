"""Bodies and clients that mean harm: each gets an answer, and the server takes the next request."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nextn.engine.request import Output
from nextn.errors import RequestError
from nextn.server import prepare, ticket
from nextn.server.bridge import Bridge
from nextn.server.protocol import ChatBody, CompletionBody
from tests.server.conftest import ANSWER
from tests.server.fake import FakeEngine, Running, running_server, wait_until

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
        '"min_tokens": N',
        '"logit_bias": {"N": 1}',
        '"guided_json": N',
        '"guided_regex": N',
        '"response_format": {"type": N}',
        '"stream": true, "stream_options": {"include_usage": N}',
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


@pytest.mark.parametrize(
    "field",
    [
        '"top_logprobs": N',
        '"tools": N',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"minimum": N}}}]',
        '"tool_choice": N',
        '"parallel_tool_calls": N',
        '"chat_template_kwargs": {"a": N}',
        '"messages": [{"role": "user", "content": N}]',
        '"messages": [{"role": N, "content": "a"}]',
        '"messages": [{"role": "tool", "content": "a", "tool_call_id": N}]',
        '"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "index": N, "function": {}}]}]',
    ],
)
def test_no_number_of_thousands_of_digits_makes_a_chat_fail(shared: Running, field: str) -> None:
    messages = "" if field.startswith('"messages"') else json.dumps(CHAT)[1:-1] + ", "
    answer = _post(shared, "chat/completions", f"{{{messages}{field.replace('N', '9' * 4300)}}}".encode())
    assert answer.status_code in (200, 400), answer.text  # a template may leave its argument unused
    assert len(answer.text) < 2000


@pytest.mark.parametrize("digits", [4300, 4301])
@pytest.mark.parametrize(
    "field",
    [
        '"guided_json": {"maximum": N}',
        '"guided_json": "{\\"maximum\\": N}"',
        '"structured_outputs": {"json": {"enum": [N]}}',
        '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"maxItems": N}}}',
    ],
)
def test_a_schema_s_long_number_is_passed_on_or_refused(shared: Running, field: str, digits: int) -> None:
    """Python reads and writes one of 4300 digits, but no longer one."""
    answer = _post(shared, "completions", f'{{"prompt": "a", {field.replace("N", "9" * digits)}}}'.encode())
    assert answer.status_code in (200, 400), answer.text
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "text", ["[" * 60_000, '{"a":' * 12_000, '{"a": 1e999}', '{"a": ' + "9" * 4301 + "}"]
)
def test_a_schema_in_a_string_is_as_bounded_as_one_in_the_body(shared: Running, text: str) -> None:
    for name in ("guided_json", "json_schema"):
        answer = _post(shared, "chat/completions", json.dumps(CHAT | {name: text}).encode())
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ['"logit_bias": {"5": N}', '"min_p": N', '"guided_json": {"maximum": N}'])
def test_what_is_no_number_is_refused(shared: Running, field: str, number: str) -> None:
    answer = _post(shared, "completions", f'{{"prompt": "a", {field.replace("N", number, 1)}}}'.encode())
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{" * 50_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"tokens": [' + b"9" * 4300 + b"]}",
        b'{"prompt": "' + b"a" * (2**20 + 1) + b'"}',
        b'{"tokens": [' + b"1," * (2**20) + b"1]}",
    ],
    ids=lambda content: repr(content[:30]) if isinstance(content, bytes) else content,
)
def test_what_cannot_be_tokenised_is_refused(shared: Running, path: str, content: bytes) -> None:
    answer = httpx.post(shared.url + path, content=content, headers=JSON, timeout=60)
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "field",
    [
        '"guided_json": D',
        '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": D}}',
        '"structured_outputs": {"json": D}',
        '"metadata": D',
        '"logit_bias": D',
        '"stop": D',
    ],
)
def test_nesting_within_the_parser_s_limit_is_answered(shared: Running, field: str) -> None:
    deep = '{"a": ' * 150 + "{}" + "}" * 150
    answer = _post(shared, "completions", f'{{"prompt": "a", {field.replace("D", deep)}}}'.encode())
    assert answer.status_code in (200, 400), answer.text


def test_a_client_that_does_not_read_holds_up_nobody(engine: FakeEngine) -> None:
    """Its answer waits in its connection; others are served meanwhile, and its leaving is noticed."""
    engine.script = lambda _: [40] * 20_000
    engine.max_model_len = 30_000
    with running_server(engine) as running:
        host, port = running.url.removeprefix("http://").split(":")
        body = json.dumps(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head.encode() + body)
            for _ in range(3):
                answer = _post(running, "completions", b'{"prompt": "a", "max_tokens": 5}')
                assert answer.status_code == 200
        wait_until(lambda: running.bridge.num_open == 0)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_nobody_reads_is_given_up_and_says_so_once(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """What waits for its client is bounded; others are served meanwhile."""
    monkeypatch.setattr(ticket, "MAX_UNREAD_BYTES", 50_000)
    seen, short = engine.seen, engine.script
    engine.script = lambda request: [40] * 10**6 if len(seen) < n else short(request)
    engine.max_model_len = 10**7
    with running_server(engine) as running:
        host, port = running.url.removeprefix("http://").split(":")
        body = json.dumps(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20, "n": n}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: len(engine.aborted) == n, 60)
            answer = _post(running, "chat/completions", json.dumps(CHAT).encode())
            assert answer.json()["choices"][0]["message"]["content"] == ANSWER
            received = b"".join(iter(lambda: connection.recv(2**20), b"")).decode()
        assert running.bridge.num_open == 0
    events = [line.removeprefix("data: ") for line in received.splitlines() if line.startswith("data: ")]
    assert [event for event in events if '"error":' in event] == events[-1:]
    error = json.loads(events[-1])["error"]
    assert (error["code"], error["type"]) == ("slow_reader", "invalid_request_error")


@given(texts=st.lists(st.text(max_size=50), min_size=1, max_size=30), reads=st.lists(st.booleans()))
def test_what_is_unread_is_counted_to_the_byte(texts: list[str], reads: list[bool]) -> None:
    """Whatever the order of arriving and reading, nothing read means nothing counted."""

    async def test() -> None:
        waiting = ticket.Ticket(Bridge(None, max_open=1), ["a"])
        left = iter(reads)
        for text in texts:
            assert waiting.put(Output("a", text, (1,), 1, 1))
            if next(left, False):
                await waiting.next()
        while waiting._arrived.qsize():
            assert waiting._unread > 0
            await waiting.next()
        assert waiting._unread == 0

    asyncio.run(test())


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
        for messages in (CHAT["messages"] * 4000, [{"role": "user", "content": "a" * 100_000}]):
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


@pytest.mark.parametrize(
    ("name", "param", "message"),
    [
        ("top-p", "top-p", "top-p is not supported by this server"),
        ("x.y z", "body", "a field of body is not supported by this server"),
        ("evil\nINFO", "body", "a field of body is not supported by this server"),
        ("", "body", "a field of body is not supported by this server"),
        ("k" * 100_000, "body", "a field of body is not supported by this server"),
        ("naïve", "body", "a field of body is not supported by this server"),
    ],
    ids=["hyphen", "space", "line break", "empty", "long", "not ASCII"],
)
def test_an_unknown_field_is_named_if_its_name_can_be_shown(
    shared: Running, name: str, param: str, message: str
) -> None:
    """The body as a whole is never called unsupported."""
    error = _post(shared, "completions", json.dumps({"prompt": "a", name: 1}).encode()).json()["error"]
    assert (error["param"], error["message"], error["code"]) == (param, message, "unsupported")


def test_an_unknown_field_of_a_message_is_named_with_its_place(shared: Running) -> None:
    content = json.dumps({"messages": [{"role": "user", "content": "a", "cache-control": 1}]}).encode()
    error = _post(shared, "chat/completions", content).json()["error"]
    assert error["param"] == "messages.0.cache-control"


def test_no_error_repeats_more_than_a_little_of_what_was_sent(shared: Running) -> None:
    """Neither the request line nor a text that an engine's library quotes."""
    host, port = shared.url.removeprefix("http://").split(":")
    for line in (b"A" * 5000 + b" / HTTP/1.1", b"GET /" + b"a" * 50_000 + b" HTTP/1.1"):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 404")
        assert len(received) < 2000


def test_an_engine_s_refusal_that_quotes_a_long_grammar_is_cut(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RequestError("the grammar cannot be used: " + "(?:" * 20_000, "grammar")

    monkeypatch.setattr(engine, "check", refuse)
    with running_server(engine) as running:
        answer = _post(running, "completions", b'{"prompt": "a", "guided_regex": "(?:"}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
    assert answer.json()["error"]["message"].startswith("the grammar cannot be used: (?:")
    assert len(answer.text) < 1300


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/tokenize/"])
def test_no_answer_sends_a_client_to_an_address_of_its_own_making(shared: Running, path: str) -> None:
    """A redirect would be built from the Host header, and carry the key there."""
    for method in ("GET", "POST"):
        answer = httpx.request(method, shared.url + path, headers={"host": "evil.example"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"


def test_a_message_that_calls_in_both_forms_is_refused(shared: Running) -> None:
    """One of them would be dropped unseen."""
    function = {"name": "f", "arguments": "{}"}
    both = {
        "role": "assistant",
        "function_call": function,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    answer = _post(shared, "chat/completions", json.dumps({"messages": [both]}).encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0.content")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a" * (2**20 + 1)}]}, "messages"),
    ],
)
def test_tokenize_names_the_field_at_fault(shared: Running, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(shared.url + "/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_answer_of_endless_logprobs_is_refused_before_it_is_computed(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt token of each answer would come back with its alternatives: megabytes for kilobytes."""
    monkeypatch.setattr(prepare, "MAX_ECHOED_LOGPROBS", 20_000)
    prompts = [[5] * 200] * 4
    body: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 0}
    assert httpx.post(shared.url + "/v1/completions", json=body, timeout=60).status_code == 200
    refused = httpx.post(shared.url + "/v1/completions", json=body | {"n": 2}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x", "stop": [1] * 400_000}),
        ("completions", {"prompt": "x", "stop_token_ids": ["a"] * 400_000}),
        ("completions", {"prompt": "x", **{f"f{i}": 1 for i in range(100_000)}}),
        ("completions", {"prompt": "x", "metadata": {f"f{i}": 1 for i in range(100_000)}}),
        ("completions", {"prompt": "x", "logit_bias": {f"f{i}": 1 for i in range(100_000)}}),
        ("chat/completions", CHAT | {"chat_template_kwargs": {f"f{i}": [] for i in range(100_000)}}),
        ("chat/completions", CHAT | {"tools": [1] * 400_000}),
        ("chat/completions", {"messages": [1] * 400_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 20_000}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "", **{f"f{i}": 1 for i in range(100_000)}}]},
        ),
    ],
    ids=str.split(
        "stop stop_ids unknown metadata bias template tools messages empty_messages message_fields"
    ),
)
def test_a_million_mistakes_cost_no_more_than_one(
    path: str, body: dict[str, Any], engine: FakeEngine
) -> None:
    """One error is made, of the first: to make them all would hold the interpreter for many seconds."""
    kind = ChatBody if path.startswith("chat") else CompletionBody
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 2
    with running_server(engine) as running:
        answer = _post(running, path, json.dumps(body).encode())
    assert answer.status_code == 400
    assert len(answer.text) < 1000
