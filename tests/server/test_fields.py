"""Every field of a request is honoured or refused with a 400 that names it; no body makes the server fail."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as ChatResource
from openai.resources.completions import Completions as CompletionResource

from nextn.engine.grammar import Grammar
from nextn.server.app import MAX_BODY_BYTES
from nextn.server.prepare import Preparer
from nextn.server.protocol import ApiError, Body, ChatBody, CompletionBody, parse_body
from nextn.text import Tokenizer
from tests.server.fake import FakeEngine, Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "Hi"}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
BODIES = {"chat": CHAT, "completion": COMPLETION}

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

NEUTRAL: list[tuple[str, str, Any]] = [
    *[(kind, "n", 1) for kind in BODIES],
    *[(kind, "logit_bias", {}) for kind in BODIES],
    *[(kind, "min_tokens", 0) for kind in BODIES],
    *[(kind, "logprobs_mode", "processed") for kind in BODIES],
    *[(kind, "include_speculation", False) for kind in BODIES],
    *[(kind, "stream", False) for kind in BODIES],
    *[(kind, "response_format", {"type": "text"}) for kind in BODIES],
    *[(kind, "structured_outputs", {}) for kind in BODIES],
    *[(kind, "service_tier", value) for kind in BODIES for value in ("auto", "default")],
    *[(kind, "store", False) for kind in BODIES],
    *[(kind, "safety_identifier", "someone") for kind in BODIES],
    *[(kind, "user", "someone") for kind in BODIES],
    *[(kind, "priority", 0) for kind in BODIES],
    *[(kind, "metadata", {"k": "v"}) for kind in BODIES],
    *[(kind, "top_k", -1) for kind in BODIES],
    *[(kind, "stop", []) for kind in BODIES],
    *[(kind, "include_stop_str_in_output", False) for kind in BODIES],
    *[(kind, "length_penalty", value) for kind in BODIES for value in (1, 1.0)],
    *[(kind, "no_stop_trim", False) for kind in BODIES],
    *[(kind, "skip_special_tokens", True) for kind in BODIES],
    *[(kind, "spaces_between_special_tokens", True) for kind in BODIES],
    *[(kind, "use_beam_search", False) for kind in BODIES],
    ("completion", "best_of", 1),
    ("completion", "echo", False),
    ("chat", "tools", []),
    ("chat", "functions", []),
    ("chat", "tool_choice", "none"),
    ("chat", "function_call", "none"),
    ("chat", "parallel_tool_calls", True),
    ("chat", "parallel_tool_calls", False),
    ("chat", "logprobs", False),
    ("chat", "top_logprobs", 0),
    ("chat", "modalities", ["text"]),
    ("chat", "verbosity", "medium"),
    ("chat", "prompt_cache_key", "k"),
    ("chat", "add_generation_prompt", True),
    ("chat", "continue_final_message", False),
    ("chat", "include_reasoning", True),
    ("chat", "separate_reasoning", True),
    ("chat", "stream_reasoning", True),
]

PARAMETERS: list[tuple[str, str, Any, str, Any]] = [
    # A field, its value, and what the engine's parameter of some name becomes.
    *[(kind, "max_tokens", 7, "max_tokens", 7) for kind in BODIES],
    ("chat", "max_completion_tokens", 7, "max_tokens", 7),
    *[(kind, "min_tokens", 3, "min_tokens", 3) for kind in BODIES],
    *[(kind, "temperature", 0, "temperature", 0.0) for kind in BODIES],
    *[(kind, "top_p", 0.5, "top_p", 0.5) for kind in BODIES],
    *[(kind, "top_k", 5, "top_k", 5) for kind in BODIES],
    *[(kind, "min_p", 0.5, "min_p", 0.5) for kind in BODIES],
    *[(kind, "frequency_penalty", -2, "frequency_penalty", -2.0) for kind in BODIES],
    *[(kind, "presence_penalty", 2, "presence_penalty", 2.0) for kind in BODIES],
    *[(kind, "repetition_penalty", 1.5, "repetition_penalty", 1.5) for kind in BODIES],
    *[(kind, "logit_bias", {"0": -100, "7": 2.5}, "logit_bias", ((0, -100.0), (7, 2.5))) for kind in BODIES],
    *[(kind, "seed", -3, "seed", -3) for kind in BODIES],
    *[(kind, "stop", "x", "stop", ("x",)) for kind in BODIES],
    *[(kind, "stop", ["x", "y"], "stop", ("x", "y")) for kind in BODIES],
    *[(kind, "stop_token_ids", [9, 8], "stop_token_ids", (9, 8)) for kind in BODIES],
    *[(kind, "ignore_eos", True, "ignore_eos", True) for kind in BODIES],
    *[(kind, "logprobs_mode", "raw", "raw_logprobs", True) for kind in BODIES],
    ("completion", "logprobs", 0, "logprobs", 0),
    ("completion", "logprobs", 20, "logprobs", 20),
    ("chat", "logprobs", True, "logprobs", 0),
    *[(kind, "response_format", {"type": "json_object"}, "grammar", Grammar("json")) for kind in BODIES],
    *[
        (
            kind,
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x"} | more},
            "grammar",
            made,
        )
        for kind in BODIES
        for more, made in (
            ({}, Grammar("json")),
            ({"schema": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
            ({"schema": SCHEMA, "strict": True}, Grammar("json_schema", json.dumps(SCHEMA))),
        )
    ],
    *[
        (kind, name, value, "grammar", made)
        for kind in BODIES
        for name, value, made in (
            ("guided_json", SCHEMA, Grammar("json_schema", json.dumps(SCHEMA))),
            ("guided_json", "{}", Grammar("json_schema", "{}")),
            ("guided_regex", "a+", Grammar("regex", "a+")),
            ("guided_grammar", "root ::= 'a'", Grammar("ebnf", "root ::= 'a'")),
            ("guided_choice", ["a.b", "c"], Grammar("regex", r"(a\.b)|(c)")),
            ("json_schema", "{}", Grammar("json_schema", "{}")),
            ("regex", "a+", Grammar("regex", "a+")),
            ("ebnf", "root ::= 'a'", Grammar("ebnf", "root ::= 'a'")),
            ("structured_outputs", {"json": {}}, Grammar("json_schema", "{}")),
            ("structured_outputs", {"regex": "a"}, Grammar("regex", "a")),
            ("structured_outputs", {"grammar": "r"}, Grammar("ebnf", "r")),
            ("structured_outputs", {"choice": ["a"]}, Grammar("regex", "(a)")),
            ("structured_outputs", {"json_object": True}, Grammar("json")),
        )
    ],
]

ELSEWHERE = {
    # Honoured in ways that tests of their own show.
    *("model", "messages", "prompt", "stream", "stream_options", "include_speculation", "n", "best_of"),
    *(
        "cache_salt",
        "priority",
        "echo",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
    ),
}

_FORMS: list[Any] = [
    *("text", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "text", "json_schema": {"name": "x"}}),
    {"type": "json_object", "schema": {}},
    {"type": "structural_tag", "format": {}},
    *[
        {"type": "json_schema", "json_schema": value}
        for value in ({}, {"name": "a b"}, {"name": "x", "y": 1})
    ],
    {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": "x" * 65536}}},
]

REFUSED: list[tuple[str, str, Any]] = [
    *[(kind, "n", value) for kind in BODIES for value in (9, 17, 0, -1, True, 1.0, "1")],
    *[
        (kind, "logit_bias", value)
        for kind in BODIES
        for value in (
            *(
                {"5": 101},
                {"5": -100.5},
                {"5": "1"},
                {"5": True},
                {"5": None},
                {"x": 1},
                {"-1": 1},
                {"05": 1},
            ),
            *({"500": 1}, {"9" * 50: 1}, {"٣": 1}, [5], {str(i): 1 for i in range(301)}),
        )
    ],
    *[(kind, "min_tokens", value) for kind in BODIES for value in (-1, 1.5, True, 10**30, 300)],
    *[(kind, "logprobs_mode", value) for kind in BODIES for value in ("both", True)],
    *[(kind, "include_speculation", value) for kind in BODIES for value in (1, "yes")],
    *[(kind, "cache_salt", value) for kind in BODIES for value in ("", "s" * 257, 5, ["s"], True)],
    *[(kind, "priority", value) for kind in BODIES for value in (2**31, -(2**31) - 1, 0.5, "1", True)],
    *[(kind, "response_format", value) for kind in BODIES for value in _FORMS],
    *[
        (kind, name, value)
        for kind in BODIES
        for name in ("guided_json", "json_schema")
        for value in ("", "{", "[]", "5", [], 5, "x" * 65537)
    ],
    *[
        (kind, name, value)
        for kind in BODIES
        for name in ("guided_regex", "guided_grammar", "regex", "ebnf")
        for value in ("", [], 5, "x" * 65537)
    ],
    *[(kind, "guided_choice", value) for kind in BODIES for value in ([], [""], "a", [1], ["a"] * 1025)],
    *[
        (kind, "structured_outputs", value)
        for kind in BODIES
        for value in ({"regex": ""}, {"xml": 1}, [], {"regex": "a", "grammar": "b"}, {"json": 5})
    ],
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
    *[
        (kind, "stream_options", value)
        for kind in BODIES
        for value in ({}, [], {"include_usage": 1}, {"x": 1})
    ],
    *[(kind, "user", 5) for kind in BODIES],
    *[(kind, "safety_identifier", 5) for kind in BODIES],
    *[(kind, "metadata", value) for kind in BODIES for value in ([], {"k": 1}, {"k": "v" * 513})],
    *[(kind, "metadata", {str(i): "v" for i in range(17)}) for kind in BODIES],
    *[(kind, "model", value) for kind in BODIES for value in (5, [])],
    *[(kind, "an_unknown_field", None) for kind in BODIES],
    *[(kind, "include_stop_str_in_output", True) for kind in BODIES],
    *[(kind, "length_penalty", 0.5) for kind in BODIES],
    *[(kind, "no_stop_trim", True) for kind in BODIES],
    *[(kind, "skip_special_tokens", False) for kind in BODIES],
    *[(kind, "spaces_between_special_tokens", False) for kind in BODIES],
    *[(kind, "use_beam_search", True) for kind in BODIES],
    *[
        ("completion", "prompt", value)
        for value in ([], [[]], [1, "a"], [True], {}, None, ["a"] * 65, [[1], "a", []])
    ],
    *[("completion", "prompt", value) for value in ([-1], [10**30], [500])],
    *[("completion", "best_of", value) for value in (2, 0, True)],
    *[("completion", "echo", value) for value in (1, "x")],
    *[("completion", "logprobs", value) for value in (-1, 21, False, 1.0)],
    ("completion", "suffix", ""),
    ("completion", "messages", []),
    ("completion", "tools", [TOOL]),
    ("chat", "prompt", "Hi"),
    ("chat", "echo", True),
    *[("chat", "messages", value) for value in ([], None, "Hi", [[]], {}, [{}])],
    *[("chat", "max_completion_tokens", value) for value in (0, "5", 10**30)],
    *[
        ("chat", "tools", value)
        for value in (
            *([TOOL], "f", {}, [5], [{"type": "function"}], [{"type": "custom", "custom": {"name": "f"}}]),
            *([TOOL, TOOL], [TOOL | {"more": 1}], [{"type": "function", "function": {"name": "a b"}}]),
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)],
        )
    ],
    ("chat", "functions", [{"name": "f"}]),
    *[("chat", "tool_choice", value) for value in ("auto", "required", {}, "f", {"type": "function"})],
    ("chat", "tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("chat", "function_call", "auto"),
    ("chat", "parallel_tool_calls", 1),
    *[("chat", "logprobs", value) for value in (1, 0)],
    *[("chat", "top_logprobs", value) for value in (1, 21, -1, False)],
    ("chat", "modalities", ["text", "audio"]),
    *[("chat", name, "x") for name in ("audio", "moderation", "prediction", "reasoning_effort", "verbosity")],
    ("chat", "prompt_cache_key", 5),
    *[("chat", f"prompt_cache_{name}", "x") for name in ("options", "retention")],
    ("chat", "web_search_options", {}),
    ("chat", "add_generation_prompt", False),
    ("chat", "continue_final_message", True),
    *[("chat", f"{name}_reasoning", False) for name in ("include", "separate", "stream")],
    *[("chat", "chat_template_kwargs", value) for value in ([], {"a b": 1}, {"a": []}, {"a": "x" * 1025})],
    ("chat", "chat_template_kwargs", {f"k{i}": 1 for i in range(17)}),
    *[("chat", "chat_template_kwargs", {name: "x"}) for name in ("tokenize", "chat_template", "bos_token")],
]

_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

MESSAGES: list[tuple[Any, str]] = [
    ({"role": "judge", "content": "x"}, "messages.0.role"),
    ({"role": ["user"], "content": "x"}, "messages.0.role"),
    ({"content": "x"}, "messages.0.role"),
    ({"role": "user"}, "messages.0.content"),
    ({"role": "assistant"}, "messages.0.content"),
    ({"role": "assistant", "content": None}, "messages.0.content"),
    ({"role": "assistant", "content": None, "tool_calls": []}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "messages.0.content"),
    ({"role": "user", "content": ["x"]}, "messages.0.content"),
    ({"role": "user", "content": "x", "name": "Bob"}, "messages.0.name"),
    ({"role": "user", "content": "x", "tool_calls": [_CALL]}, "messages.0.tool_calls"),
    ({"role": "user", "content": "x", "mood": "good"}, "messages.0.mood"),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages.0.tool_calls.0.id"),
    ({"role": "assistant", "tool_calls": [_CALL | {"type": "x"}]}, "messages.0.tool_calls.0.type"),
    ({"role": "assistant", "content": "x", "audio": {}}, "messages.0.audio"),
    ({"role": "assistant", "content": "x", "refusal": "no"}, "messages.0.refusal"),
    ({"role": "tool", "content": "x"}, "messages.0.tool_call_id"),
    ({"role": "tool", "tool_call_id": "1"}, "messages.0.content"),
    ({"role": "function", "content": "x"}, "messages.0.name"),
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
    assert error.keys() == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return True


@pytest.mark.parametrize(("kind", "field", "value"), NEUTRAL)
def test_values_that_ask_for_nothing_are_accepted(kind: str, field: str, value: Any) -> None:
    body: type[ChatBody | CompletionBody] = ChatBody if kind == "chat" else CompletionBody
    parsed = parse_body(body, json.dumps(BODIES[kind] | {field: value}).encode())
    plain = parse_body(body, json.dumps(BODIES[kind]).encode())
    assert parsed.sampling_params(5, None) == plain.sampling_params(5, None)
    assert parsed.constraint is None


@pytest.mark.parametrize(("kind", "field", "value", "parameter", "expected"), PARAMETERS)
def test_what_is_honoured_reaches_the_engine(
    tokenizer: Tokenizer, kind: str, field: str, value: Any, parameter: str, expected: Any
) -> None:
    preparer = Preparer(FakeEngine(tokenizer, lambda _: []), ["fake"], 4)
    prepare = preparer.chat if kind == "chat" else preparer.completion
    (request,) = prepare(json.dumps(BODIES[kind] | {field: value}).encode()).requests
    assert getattr(request.params, parameter) == expected
    (plain,) = prepare(json.dumps(BODIES[kind]).encode()).requests
    assert replace(request.params, **{parameter: getattr(plain.params, parameter)}) == plain.params


@pytest.mark.parametrize(("kind", "body"), [("chat", ChatBody), ("completion", CompletionBody)])
def test_every_field_has_its_place_in_the_tables(kind: str, body: type[Body]) -> None:
    """Each is honoured, or accepted where it asks for nothing; and each has values that are refused."""
    accepted = {row[1] for row in (*NEUTRAL, *PARAMETERS) if row[0] == kind} | ELSEWHERE
    only_null = {"suffix", "audio", "moderation", "prediction", "reasoning_effort", "web_search_options"}
    only_null |= {"prompt_cache_options", "prompt_cache_retention"}
    names = {field.alias or name for name, field in body.model_fields.items()}
    assert names <= accepted | only_null
    assert names <= {field for own, field, _ in REFUSED if own == kind}


@pytest.mark.parametrize("kind", list(BODIES))
def test_two_constraints_exclude_each_other(http: httpx.Client, kind: str) -> None:
    both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    answer = http.post(PATHS[kind], json=BODIES[kind] | both)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")


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
    nulls = dict.fromkeys(
        ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content")
    )
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
    assert answer.json()["error"]["param"] == "stream_options"


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


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("stream_options", {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        ("include_speculation", {"stream": True, "include_speculation": True}),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_field_that_would_have_no_effect_is_refused(
    path: str, field: str, fields: dict[str, Any], http: httpx.Client
) -> None:
    """It changes an answer's part that is not asked for."""
    body = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = http.post(f"/v1/{path}", json=body | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
