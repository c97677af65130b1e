"""Answers as they grow: streamed or whole they say the same, and every token's entry comes with its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextn.engine.request import Output, Request, SamplingParams
from nextn.server.chat import MARKERS
from nextn.server.logprobs import Offsets, ShownTokens, Spelling, prompt_entries
from nextn.text import MARKERS as SHOWN_MARKERS
from nextn.text import Tokenizer
from tests.server.byte_bpe import write_tokenizer
from tests.server.conftest import ANSWER
from tests.server.fake import FakeEngine, Running, Script, logprobs_of, running_server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEMPLATES = Path(__file__).parent.parent / "data" / "chat"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CALLS = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Zürich 😀"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as streams do."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def _outputs(engine: FakeEngine, prompt: list[int], params: SamplingParams) -> list[Output]:
    engine.add(Request("r", prompt, params))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


@given(
    text=st.text(max_size=30) | st.lists(st.sampled_from(["END", "EN", "é", "😀", "###", " "])).map("".join),
    run=st.integers(1, 5),
    stop=st.sampled_from([(), ("END",), ("###", "é")]),
    cut=st.integers(1, 40),
)
def test_an_entry_comes_with_the_text_that_completes_its_token(
    tokenizer: Tokenizer, text: str, run: int, stop: tuple[str, ...], cut: int
) -> None:
    """Never before its text, never later, all of them once, and each at its place in the text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    engine = FakeEngine(tokenizer, lambda _: tokens, run_length=run)
    outputs = _outputs(engine, [5], SamplingParams(max_tokens=cut, stop=stop, logprobs=0))
    held = ShownTokens(tokenizer)
    shown, entries = "", []
    for output in outputs:
        shown += output.text
        entries += held.take(output)
        data = b"".join(tokenizer.token_bytes(entry.token_id) for entry in entries)
        if output.finish_reason is None:
            assert shown.encode().startswith(data)
            following = tokens[len(entries) : len(entries) + 1]
            assert not following or not shown.encode().startswith(data + tokenizer.token_bytes(following[0]))
    assert [entry.token_id for entry in entries] == [token for o in outputs for token in o.token_ids]
    for entry in entries:
        spelt = tokenizer.token_text(entry.token_id)
        if not spelt.startswith("bytes:") and entry.token_id not in tokenizer.special_ids:
            assert text[entry.offset :].startswith(spelt)


@given(tokens=st.lists(st.integers(0, 430), min_size=1, max_size=20))
def test_any_tokens_at_all_have_entries_in_order(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Halves of characters, numbers that are no token: offsets never fall and never leave the text."""
    engine = FakeEngine(tokenizer, lambda _: tokens)
    held = ShownTokens(tokenizer)
    outputs = _outputs(engine, [5], SamplingParams(max_tokens=50, logprobs=2))
    entries = [entry for output in outputs for entry in held.take(output)]
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len("".join(output.text for output in outputs))
    legacy = Spelling(tokenizer).legacy(entries)
    assert {len(each) for each in legacy.values()} == {len(entries)}
    json.dumps([legacy, Spelling(tokenizer).chat(entries)], allow_nan=False)


@pytest.mark.parametrize("stop", [None, "END", ["###", "two"]])
@pytest.mark.parametrize("limit", [1, 7, 100])
def test_streamed_and_whole_answers_are_the_same(shared: Running, stop: Any, limit: int) -> None:
    """Text, reason and every log-probability, at both endpoints."""
    body = {"max_tokens": limit, "stop": stop, "stream": False}
    chat = CHAT | body | {"logprobs": True, "top_logprobs": 3}
    url = shared.url + "/v1/chat/completions"
    (whole,) = httpx.post(url, json=chat).json()["choices"]
    chunks = [each["choices"][0] for each in _events(httpx.post(url, json=chat | {"stream": True}))]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    parts = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert [entry for part in parts for entry in part] == whole["logprobs"]["content"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]

    completion = {"prompt": "Hi", "logprobs": 3} | body
    url = shared.url + "/v1/completions"
    (whole,) = httpx.post(url, json=completion).json()["choices"]
    chunks = [each["choices"][0] for each in _events(httpx.post(url, json=completion | {"stream": True}))]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [v for chunk in chunks if chunk["logprobs"] for v in chunk["logprobs"][name]] == values


def test_a_chat_s_entries_have_openai_s_form(shared: Running, tokenizer: Tokenizer) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 3}
    (choice,) = httpx.post(shared.url + "/v1/chat/completions", json=body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == ANSWER
    tokens = [*tokenizer.encode(ANSWER, add_special_tokens=False), 1]
    assert [entry["token"] for entry in entries] == [tokenizer.token_text(token) for token in tokens]
    assert [entry["logprob"] for entry in entries] == [-token / 8 for token in tokens]
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [0, -0.5, -9999.0]
    assert all(entry.keys() == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)


def test_a_completion_s_entries_have_the_legacy_form(shared: Running, tokenizer: Tokenizer) -> None:
    """Four lists; the chosen token is always among the alternatives; offsets point into the text."""
    body = {"prompt": "Hi", "max_tokens": 100, "logprobs": 2}
    (choice,) = httpx.post(shared.url + "/v1/completions", json=body).json()["choices"]
    logprobs = choice["logprobs"]
    assert len(set(map(len, logprobs.values()))) == 1
    for token, chosen, top, offset in zip(*logprobs.values(), strict=True):
        assert top[token] == chosen
        assert (
            token.startswith("bytes:") or choice["text"][offset:].startswith(token) or offset == len(ANSWER)
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [0, 5])
def test_echo_repeats_the_prompt_and_its_logprobs(
    shared: Running, tokenizer: Tokenizer, stream: bool, limit: int
) -> None:
    """With max_tokens 0 nothing else: no text, no entry, no token in the usage."""
    prompt = "Über 😀 dogs"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": limit}
    whole = httpx.post(shared.url + "/v1/completions", json=body).json()
    (choice,) = whole["choices"]
    if stream:
        events = _events(httpx.post(shared.url + "/v1/completions", json=body | {"stream": True}))
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert choice["text"].startswith(prompt)
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == limit
    logprobs, tokens = choice["logprobs"], tokenizer.encode(prompt)
    assert len(logprobs["tokens"]) == len(tokens) + limit
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(tokens)] == [-token / 8 for token in tokens[1:]]
    assert logprobs["text_offset"][:2] == [0, 0]  # BOS is no text
    for token, offset in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    if not limit:
        assert choice["text"] == prompt


def test_echo_of_token_ids_leaves_bos_out(shared: Running, tokenizer: Tokenizer) -> None:
    body = {"prompt": tokenizer.encode("a dog"), "echo": True, "max_tokens": 0}
    (choice,) = httpx.post(shared.url + "/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("a dog", None)


def test_a_prompt_s_entries_are_at_their_places(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("naïve 世界")
    given = [None, *(logprobs_of(token, 0) for token in tokens[1:])]
    entries = prompt_entries(tokenizer, tokens, given, bare_bos=True)
    assert [entry.offset for entry in entries[:2]] == [0, 0]
    named = prompt_entries(tokenizer, tokens, given, bare_bos=False)
    assert named[1].offset == len(tokenizer.token_text(tokens[0]))


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_are_requests_with_one_prompt(engine: FakeEngine, stream: bool) -> None:
    """Each has a choice of its own; the prompt counts once, and so do its cached tokens."""
    seen = engine.seen
    with running_server(engine) as running:
        body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 4, "seed": 5, "stream": stream}
        answer = httpx.post(running.url + "/v1/completions", json=body | _usage(stream))
    events = _events(answer) if stream else [answer.json()]
    texts = ["" for _ in range(6)]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert all(texts)
    assert [request.choice for request in seen] == [0, 1, 2] * 2
    prompt = len(seen[0].prompt_tokens) + len(seen[3].prompt_tokens)
    assert events[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 24,
        "total_tokens": prompt + 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_salt_and_priority_reach_every_request_of_a_body(engine: FakeEngine, path: str) -> None:
    body = {"prompt": "Hi"} if path == "completions" else CHAT
    with running_server(engine) as running:
        for more in ({}, {"cache_salt": "tenant 😀", "priority": -3}):
            answer = httpx.post(f"{running.url}/v1/{path}", json=body | more | {"n": 2, "max_tokens": 2})
            assert answer.status_code == 200
    given = [(request.cache_salt, request.priority) for request in engine.seen]
    assert given == [(None, 0)] * 2 + [("tenant 😀", -3)] * 2


def _usage(stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if stream else {}


def test_chat_choices_are_streamed_apart(shared: Running) -> None:
    """Each opens with its role and ends with its reason; the usage comes last, once."""
    body = CHAT | {"n": 2, "stream": True} | _usage(True)
    events = _events(httpx.post(shared.url + "/v1/chat/completions", json=body))
    for index in (0, 1):
        own = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["delta"].get("content", "") for chunk in own) == ANSWER
        assert [chunk["finish_reason"] for chunk in own] == [None] * (len(own) - 1) + ["stop"]
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1]["choices"] == []


def test_usage_may_come_with_every_chunk(shared: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream": True, "stream_options": options}
    events = _events(httpx.post(shared.url + "/v1/chat/completions", json=body))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] < counts[len(counts) // 2] < counts[-1]
    assert events[-1]["usage"] == events[-2]["usage"]


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", {"prompt": ["a", "bcd"]})]
)
def test_every_chunk_s_usage_counts_all_prompts(path: str, body: dict[str, Any], shared: Running) -> None:
    """From the first on, before any of them is computed, and each once whatever its choices."""
    body = body | {"n": 2, "max_tokens": 4, "stream": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = _events(httpx.post(f"{shared.url}/v1/{path}", json=body))
    whole = httpx.post(f"{shared.url}/v1/{path}", json=body | {"stream": False, "stream_options": None})
    expected = whole.json()["usage"]["prompt_tokens"]
    assert expected > 0
    assert {event["usage"]["prompt_tokens"] for event in events} == {expected}


@pytest.mark.parametrize(
    ("data", "starts"),
    [
        (b"\xe4\xe4\xe4a", [0, 1, 2, 3]),
        (b"\xe4\xb8a", [0, 0, 1]),
        (b"\xf0\x9f\xe4\xb8\xada", [0, 0, 1, 1, 1, 2]),
        (b"\xe0\x80a", [0, 1, 2]),
        ("ä中🙂\ufffda".encode(), [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4]),
    ],
)
def test_offsets_are_where_texts_begin_however_broken_their_characters(
    data: bytes, starts: list[int]
) -> None:
    """One token a byte: it begins where its character does, or behind what stands for one that it breaks."""
    tokenizer = SimpleNamespace(token_bytes=lambda token, skip: bytes([token]))
    offsets = Offsets(tokenizer)  # type: ignore[arg-type]
    assert [offsets.push(byte)[0] for byte in data] == starts


@pytest.mark.parametrize("stream", [False, True])
def test_speculation_is_told_only_when_asked(shared: Running, stream: bool) -> None:
    body = CHAT | {"stream": stream, "include_speculation": True} | _usage(stream)
    answer = httpx.post(shared.url + "/v1/chat/completions", json=body)
    usage = _events(answer)[-1]["usage"] if stream else answer.json()["usage"]
    told = usage["speculation"]
    assert told.keys() >= {"cycles", "drafted_tokens", "accepted_tokens", "accepted_by_position"}
    assert told["cycles"] + told["accepted_tokens"] == usage["completion_tokens"]
    assert sum(told["accepted_by_position"]) == told["accepted_tokens"]
    plain = httpx.post(shared.url + "/v1/chat/completions", json=CHAT).json()["usage"]
    assert "speculation" not in plain


@pytest.mark.parametrize(
    ("text", "params", "shown", "reason"),
    [
        ("one END", {"stop": "END", "max_tokens": 100}, "one ", "stop"),
        ("one END", {"max_tokens": 100}, "one END", "stop"),  # EOS
        ("one two", {"max_tokens": 2}, None, "length"),
        ("aaaa", {"stop": "aa", "max_tokens": 100}, "", "stop"),
    ],
)
@pytest.mark.parametrize("run", [1, 2, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_the_reason_is_what_came_first(
    tokenizer: Tokenizer,
    text: str,
    params: dict[str, Any],
    shown: str | None,
    reason: str,
    run: int,
    stream: bool,
) -> None:
    engine = FakeEngine(tokenizer, lambda _: tokenizer.encode(text, add_special_tokens=False), run_length=run)
    with running_server(engine) as running:
        answer = httpx.post(running.url + "/v1/completions", json={"prompt": "a", "stream": stream} | params)
    choices = [event["choices"][0] for event in (_events(answer) if stream else [answer.json()])]
    assert choices[-1]["finish_reason"] == reason
    joined = "".join(choice["text"] for choice in choices)
    assert joined == shown if shown is not None else text.startswith(joined)


@pytest.mark.parametrize("run", [1, 2, 3, 5, 8, 1000])
def test_a_stop_string_is_found_wherever_steps_cut_it(tokenizer: Tokenizer, run: int) -> None:
    """At the last token that may come, before EOS of the same step, in the middle of a step."""
    tokens = tokenizer.encode("ab ###c", add_special_tokens=False)
    last = next(i for i in range(len(tokens) + 1) if "###" in tokenizer.decode(tokens[:i]))
    for limit in (last, last + 1, 100):
        engine = FakeEngine(tokenizer, lambda _: tokens, run_length=run)
        outputs = _outputs(engine, [5], SamplingParams(max_tokens=limit, stop=("###",)))
        assert ("".join(o.text for o in outputs), outputs[-1].finish_reason) == ("ab ", "stop")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose template knows reasoning and tools."""
    template = (TEMPLATES / "v31.jinja").read_text(encoding="utf-8")
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("v31"), chat_template=template))


@pytest.fixture(scope="module")
def calling(caller: Tokenizer, script: Script) -> Iterator[Running]:
    with running_server(FakeEngine(caller, _answering(caller), max_model_len=4096)) as running:
        yield running


def _answering(tokenizer: Tokenizer) -> Script:
    """Answer with the part of the prompt between two marks."""

    def answer(request: Request) -> list[int]:
        prompt = tokenizer.decode(request.prompt_tokens)
        text = prompt.split("[[")[1].split("]]")[0]
        return tokenizer.encode(text.replace("CALLS", CALLS), add_special_tokens=False)

    return answer


def _asked(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"[[{text}]]"}], **more}


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_told_apart_from_text(calling: Running, stream: bool, logprobs: bool) -> None:
    body = _asked("Let me see.CALLS", tools=TOOLS, stream=stream, logprobs=logprobs)
    answer = httpx.post(calling.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message, reason, entries = _message(answer, stream)
    assert message["content"] == "Let me see."
    names = [(call["type"], call["function"]["name"]) for call in message["tool_calls"]]
    assert names == [("function", "f"), ("function", "g")]
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"city": "Zürich 😀"}, {}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert reason == "tool_calls"
    if logprobs:
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "Let me see." + CALLS


def _message(answer: httpx.Response, stream: bool) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """Message, reason and log-probabilities of an answer, put together as a client does it."""
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["message"], choice["finish_reason"], (choice["logprobs"] or {}).get("content", [])
    chunks = [event["choices"][0] for event in _events(answer)]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for name, value in chunk["delta"].items():
            if value is None:
                continue
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for part in value:
                if part["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({**part, "function": dict(part["function"])})
                else:
                    own = message["tool_calls"][part["index"]]
                    own["function"]["arguments"] += part["function"]["arguments"]
    entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    return message, chunks[-1]["finish_reason"], entries


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart_from_text(calling: Running, stream: bool) -> None:
    body = _asked("so and so</think>It is.", stream=stream, chat_template_kwargs={"thinking": True})
    message, reason, _ = _message(httpx.post(calling.url + "/v1/chat/completions", json=body), stream)
    assert (message["reasoning_content"], message["content"], reason) == ("so and so", "It is.", "stop")


def test_calls_alone_have_no_content_and_calls_cut_off_end_with_length(calling: Running) -> None:
    url = calling.url + "/v1/chat/completions"
    (choice,) = httpx.post(url, json=_asked("CALLS", tools=TOOLS)).json()["choices"]
    assert choice["message"]["content"] is None
    (choice,) = httpx.post(url, json=_asked("CALLS", tools=TOOLS, max_tokens=80)).json()["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_forced_call_is_a_grammar_for_the_engine(caller: Tokenizer, choice: Any) -> None:
    engine = FakeEngine(caller, _answering(caller), max_model_len=4096)
    with running_server(engine) as running:
        body = _asked("CALLS", tools=TOOLS, tool_choice=choice)
        assert httpx.post(running.url + "/v1/chat/completions", json=body).status_code == 200
    grammar = engine.seen[0].params.grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"


def test_without_tools_markers_are_text(calling: Running) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = httpx.post(calling.url + "/v1/chat/completions", json=_asked("CALLS", **more)).json()[
            "choices"
        ]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")


def test_a_conversation_with_calls_and_results_goes_on(calling: Running) -> None:
    """The message of an answer may be sent back as it came, and the results after it."""
    url = calling.url + "/v1/chat/completions"
    first = _asked("CALLS", tools=TOOLS)
    message = httpx.post(url, json=first).json()["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"}
        for i, call in enumerate(message["tool_calls"])
    ]
    again = httpx.post(url, json=first | {"messages": [*first["messages"], message, *results]})
    assert again.status_code == 200, again.text


def test_the_older_function_messages_are_understood(calling: Running) -> None:
    messages = [
        *_asked("fine")["messages"],
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "sunny"},
    ]
    answer = httpx.post(calling.url + "/v1/chat/completions", json={"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "fine"


def test_the_text_shows_every_marker_that_the_parser_reads() -> None:
    assert set(MARKERS) == set(SHOWN_MARKERS)


def test_tools_are_refused_where_the_template_has_none(shared: Running) -> None:
    answer = httpx.post(shared.url + "/v1/chat/completions", json=CHAT | {"tools": TOOLS})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
