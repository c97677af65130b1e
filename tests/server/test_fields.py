"""Every field of a request is honoured or refused with a 400 that names it; no body makes the server fail."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as ChatResource
from openai.resources.completions import Completions as CompletionResource

from nextn.server.app import MAX_BODY_BYTES
from nextn.server.protocol import ApiError, ChatBody, CompletionBody, parse_body
from tests.server.fake import Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "Hi"}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
BODIES = {"chat": CHAT, "completion": COMPLETION}

NEUTRAL: list[tuple[str, str, Any]] = [
    *[(kind, "n", 1) for kind in BODIES],
    *[(kind, "logit_bias", {}) for kind in BODIES],
    *[(kind, "response_format", {"type": "text"}) for kind in BODIES],
    *[(kind, "service_tier", "auto") for kind in BODIES],
    *[(kind, "store", False) for kind in BODIES],
    *[(kind, "safety_identifier", "someone") for kind in BODIES],
    *[(kind, "user", "someone") for kind in BODIES],
    *[(kind, "metadata", {"k": "v"}) for kind in BODIES],
    *[(kind, "top_k", -1) for kind in BODIES],
    *[(kind, "stop", []) for kind in BODIES],
    ("completion", "best_of", 1),
    ("completion", "echo", False),
    ("chat", "tools", []),
    ("chat", "functions", []),
    ("chat", "tool_choice", "none"),
    ("chat", "function_call", "none"),
    ("chat", "parallel_tool_calls", True),
    ("chat", "logprobs", False),
    ("chat", "top_logprobs", 0),
    ("chat", "modalities", ["text"]),
]

REFUSED: list[tuple[str, str, Any]] = [
    *[(kind, "n", value) for kind in BODIES for value in (2, 0, True, 1.0, "1")],
    *[(kind, "logit_bias", {"5": 1}) for kind in BODIES],
    *[(kind, "response_format", value) for kind in BODIES for value in ({"type": "json_object"}, "text")],
    *[(kind, "service_tier", "flex") for kind in BODIES],
    *[(kind, "store", value) for kind in BODIES for value in (True, 0)],
    *[(kind, "max_tokens", value) for kind in BODIES for value in (0, -1, "5", 5.0, True, 10**30, [])],
    *[(kind, "temperature", value) for kind in BODIES for value in (-0.1, 101, "1", True)],
    *[(kind, "top_p", value) for kind in BODIES for value in (0, 1.1, -1)],
    *[(kind, "top_k", value) for kind in BODIES for value in (-2, 1.5, 2**31)],
    *[(kind, "min_p", value) for kind in BODIES for value in (-0.1, 1.1)],
    *[(kind, "frequency_penalty", value) for kind in BODIES for value in (-2.1, 2.1)],
    *[(kind, "presence_penalty", value) for kind in BODIES for value in (-2.1, 2.1)],
    *[(kind, "repetition_penalty", value) for kind in BODIES for value in (0, 10.1)],
    *[(kind, "seed", value) for kind in BODIES for value in (2**63, -(2**63) - 1, "1", 0.5)],
    *[(kind, "stop", value) for kind in BODIES for value in ("", [""], [1], {}, ["x" * 257], ["x"] * 17)],
    *[(kind, "stop_token_ids", value) for kind in BODIES for value in (1, ["a"], [1.5], [1] * 257)],
    *[(kind, "ignore_eos", 1) for kind in BODIES],
    *[(kind, "stream", value) for kind in BODIES for value in (1, "true")],
    *[(kind, "user", 5) for kind in BODIES],
    *[(kind, "safety_identifier", 5) for kind in BODIES],
    *[(kind, "metadata", value) for kind in BODIES for value in ([], {"k": 1}, {"k": "v" * 513})],
    *[(kind, "metadata", {str(i): "v" for i in range(17)}) for kind in BODIES],
    *[(kind, "model", value) for kind in BODIES for value in (5, [])],
    *[(kind, "an_unknown_field", None) for kind in BODIES],
    *[(kind, "min_tokens", 3) for kind in BODIES],
    *[
        ("completion", "prompt", value)
        for value in ([], [[]], [1, "a"], [True], {}, None, ["a"] * 65, [[1], "a", []])
    ],
    *[("completion", "prompt", value) for value in ([-1], [10**30], [500])],
    ("completion", "best_of", 2),
    ("completion", "echo", True),
    *[("completion", "logprobs", value) for value in (0, 1, False)],
    ("completion", "suffix", ""),
    ("completion", "messages", []),
    ("chat", "prompt", "Hi"),
    *[("chat", "messages", value) for value in ([], None, "Hi", [[]], {}, [{}])],
    *[("chat", "max_completion_tokens", value) for value in (0, "5", 10**30)],
    ("chat", "tools", [{"type": "function", "function": {"name": "f"}}]),
    ("chat", "functions", [{"name": "f"}]),
    *[("chat", "tool_choice", value) for value in ("auto", "required", {})],
    ("chat", "function_call", "auto"),
    ("chat", "parallel_tool_calls", False),
    *[("chat", "logprobs", value) for value in (True, 0)],
    *[("chat", "top_logprobs", value) for value in (1, False)],
    ("chat", "modalities", ["text", "audio"]),
    *[("chat", name, "x") for name in ("audio", "moderation", "prediction", "reasoning_effort", "verbosity")],
    *[("chat", f"prompt_cache_{name}", "x") for name in ("key", "options", "retention")],
    ("chat", "web_search_options", {}),
    *[("chat", "chat_template_kwargs", value) for value in ([], {"a b": 1}, {"a": []}, {"a": "x" * 1025})],
    ("chat", "chat_template_kwargs", {f"k{i}": 1 for i in range(17)}),
    *[("chat", "chat_template_kwargs", {name: "x"}) for name in ("tokenize", "chat_template", "bos_token")],
]

MESSAGES: list[tuple[Any, str]] = [
    ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages.0.role"),
    ({"role": "judge", "content": "x"}, "messages.0.role"),
    ({"role": ["user"], "content": "x"}, "messages.0.role"),
    ({"role": "user"}, "messages.0.content"),
    ({"role": "assistant", "content": None}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "messages.0.content"),
    ({"role": "user", "content": ["x"]}, "messages.0.content"),
    ({"role": "user", "content": "x", "name": "Bob"}, "messages.0.name"),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages.0.tool_calls"),
    ({"role": "user", "content": "x", "mood": "good"}, "messages.0.mood"),
]


@pytest.fixture(scope="module")
def http(shared: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=30) as client:
        yield client


def _is_error(answer: httpx.Response) -> bool:
    """Whether the body is an error in OpenAI's shape."""
    body = answer.json()
    if body.keys() != {"error"}:
        return False
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return True


@pytest.mark.parametrize(("kind", "field", "value"), NEUTRAL)
def test_values_that_ask_for_nothing_are_accepted(kind: str, field: str, value: Any) -> None:
    body: type[ChatBody | CompletionBody] = ChatBody if kind == "chat" else CompletionBody
    parsed = parse_body(body, json.dumps(BODIES[kind] | {field: value}).encode())
    assert parsed.sampling_params(5) == parse_body(body, json.dumps(BODIES[kind]).encode()).sampling_params(5)


@pytest.mark.parametrize("kind", list(BODIES))
def test_null_stands_for_the_default_of_every_field(http: httpx.Client, kind: str) -> None:
    fields = (ChatBody if kind == "chat" else CompletionBody).model_fields
    nulls = {name: None for name in fields if name not in BODIES[kind]}
    answer = http.post(PATHS[kind], json=nulls | BODIES[kind])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("kind", "field", "value"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    http: httpx.Client, kind: str, field: str, value: Any
) -> None:
    answer = http.post(PATHS[kind], json=BODIES[kind] | {field: value})
    assert answer.status_code == 400, answer.text
    assert _is_error(answer)
    assert answer.json()["error"]["param"].split(".")[0] == field


@pytest.mark.parametrize(("message", "param"), MESSAGES)
def test_messages_that_cannot_be_honoured_are_refused(http: httpx.Client, message: Any, param: str) -> None:
    answer = http.post(PATHS["chat"], json={"messages": [message]})
    assert answer.status_code == 400
    assert _is_error(answer)
    assert answer.json()["error"]["param"] == param


def test_an_answer_s_message_may_be_sent_back_as_it_came(http: httpx.Client) -> None:
    """Clients append choices[0].message, with all its nulls, and go on."""
    message = http.post(PATHS["chat"], json=CHAT).json()["choices"][0]["message"]
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    again = http.post(
        PATHS["chat"], json={"messages": [*CHAT["messages"], message | nulls, *CHAT["messages"]]}
    )
    assert again.status_code == 200


@pytest.mark.parametrize(
    ("resource", "kind"), [(ChatResource, ChatBody), (CompletionResource, CompletionBody)]
)
def test_every_parameter_of_the_openai_client_is_known(resource: Any, kind: type[ChatBody]) -> None:
    """Known means: honoured, or refused with a word about what would do instead."""
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(resource.create).parameters) - own <= set(kind.model_fields)


def test_both_limits_may_be_given_if_they_agree(http: httpx.Client) -> None:
    same = http.post(PATHS["chat"], json=CHAT | {"max_tokens": 5, "max_completion_tokens": 5})
    assert same.json()["usage"]["completion_tokens"] == 5
    differ = http.post(PATHS["chat"], json=CHAT | {"max_tokens": 5, "max_completion_tokens": 6})
    assert differ.status_code == 400
    assert _is_error(differ)


@pytest.mark.parametrize("options", [{"stream": False}, {}])
def test_stream_options_need_a_stream(http: httpx.Client, options: dict[str, Any]) -> None:
    answer = http.post(PATHS["chat"], json=CHAT | options | {"stream_options": {"include_usage": True}})
    assert answer.status_code == 400
    assert "stream" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"prompt": "Hi"} x',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "Hi", "temperature": NaN}',
        b'{"prompt": "Hi", "temperature": Infinity}',
        b'{"prompt": "Hi", "temperature": 1e999}',
        b'{"prompt": "Hi", "max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "Hi", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:45]),
)
def test_what_is_no_proper_json_is_refused(http: httpx.Client, content: bytes) -> None:
    answer = http.post(PATHS["completion"], content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert _is_error(answer)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_refused(http: httpx.Client, kind: str) -> None:
    answer = http.post(PATHS["completion"], content=b'{"prompt": "Hi"}', headers={"content-type": kind})
    assert answer.status_code == 415
    assert _is_error(answer)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_refused(http: httpx.Client, chunked: bool) -> None:
    size = MAX_BODY_BYTES + 1
    content: Any = (b"x" * 65536 for _ in range(size // 65536 + 1)) if chunked else b"x" * size
    answer = http.post(PATHS["completion"], content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert _is_error(answer)


_FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "unknown", "role", "content", "type"})
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "system", "text", "none", "auto", "fake"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_FIELDS), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", list(BODIES))
@given(data=st.data())
def test_no_body_makes_the_server_fail(http: httpx.Client, kind: str, data: st.DataObject) -> None:
    """Valid bodies with some fields replaced by anything: an answer, or an error that is the client's."""
    changes = data.draw(st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=3))
    content = json.dumps(BODIES[kind] | changes).encode()
    answer = http.post(PATHS[kind], content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200 or (400 <= answer.status_code < 500 and _is_error(answer))


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@given(content=st.binary(max_size=80) | _VALUES.map(lambda value: json.dumps(value).encode()))
def test_bytes_are_parsed_or_refused(kind: type[ChatBody], content: bytes) -> None:
    try:
        outcome: object = parse_body(kind, content)
    except ApiError as error:
        outcome = error
    assert isinstance(outcome, kind) or (isinstance(outcome, ApiError) and outcome.status == 400)
