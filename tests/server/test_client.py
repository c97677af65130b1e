"""The openai client's own types and helpers against the whole server, engine and all, over the demo model.

The demo's template knows no tools, so this one has a template with DeepSeek-V3.1's forms; its small model
writes calls and JSON because grammars make it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from nextn import demo
from nextn.config import EngineConfig, SpecConfig
from nextn.engine.engine import Engine
from tests.server.fake import running_server

pytest.importorskip("llguidance")

TEMPLATE = Path(__file__).parent.parent / "data" / "chat" / "v31.jinja"
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 12 + 7 * 3?"}]
SETTINGS: dict[str, Any] = {"model": "fake", "messages": ASKED, "temperature": 0.7, "seed": 3}


class Step(BaseModel):
    """A line of the answer."""

    kind: Literal["add", "multiply"]
    digits: list[int] = Field(max_length=3)


class Sum(BaseModel):
    """What is asked for."""

    steps: list[Step] = Field(max_length=2)
    even: bool


class City(BaseModel):
    """Arguments of a tool."""

    name: Literal["Ulm", "Bonn"]
    days: list[bool] = Field(max_length=2)


TOOL = openai.pydantic_function_tool(City, name="weather")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("demo")
    for file in demo.path().iterdir():
        if file.is_file():
            os.symlink(file, folder / file.name)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").unlink()
    settings["chat_template"] = TEMPLATE.read_text(encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = EngineConfig(
        device="cpu", dtype="float32", spec=SpecConfig(2, 4, 4), num_pages=64, max_model_len=1024
    )
    with (
        running_server(Engine.from_config(folder, config)) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as made,
    ):
        yield made


def test_answers_have_the_client_s_types(client: openai.OpenAI) -> None:
    """`model_validate` is strict about every member that the client declares."""
    answer = client.chat.completions.create(**SETTINGS, max_tokens=12, n=2, logprobs=True, top_logprobs=2)
    type(answer).model_validate_json(answer.model_dump_json(), strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert choice.message.content is not None
        shown = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or ())
        assert shown.decode(errors="replace") == choice.message.content
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) <= 2
            assert [e.logprob for e in entry.top_logprobs] == sorted(
                (e.logprob for e in entry.top_logprobs), reverse=True
            )
    plain = client.completions.create(model="fake", prompt="def main(", max_tokens=8, logprobs=2)
    type(plain).model_validate_json(plain.model_dump_json(), strict=True)
    # The client's type lacks the null of a prompt's first token, which OpenAI's answers have.
    text = client.completions.create(model="fake", prompt="def main(", max_tokens=8, logprobs=2, echo=True)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens is not None
    assert text.usage is not None
    assert len(logprobs.tokens) == text.usage.prompt_tokens + 8
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_n_answers_are_those_of_their_choices_alone(client: openai.OpenAI) -> None:
    """Each is the same whatever n is, streamed or not."""
    one = client.chat.completions.create(**SETTINGS, max_tokens=16)
    three = client.chat.completions.create(**SETTINGS, max_tokens=16, n=3)
    assert three.choices[0].message == one.choices[0].message
    assert len({choice.message.content for choice in three.choices}) > 1
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**SETTINGS, max_tokens=16, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in three.choices]


def test_the_streaming_helper_ends_with_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**SETTINGS, max_tokens=24, logprobs=True)
    with client.chat.completions.stream(
        **SETTINGS, max_tokens=24, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices[0].logprobs == whole.choices[0].logprobs
    assert final.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_parse_gives_the_model_that_was_asked_for(client: openai.OpenAI, stream: bool) -> None:
    """Strict schemas of pydantic models, with references and bounds."""
    if stream:
        with client.chat.completions.stream(**SETTINGS, max_tokens=400, response_format=Sum) as made:
            answer = made.get_final_completion()
    else:
        answer = client.chat.completions.parse(**SETTINGS, max_tokens=400, response_format=Sum)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Sum)
    assert choice.message.content is not None
    assert Sum.model_validate_json(choice.message.content) == choice.message.parsed


def test_json_mode_gives_an_object(client: openai.OpenAI) -> None:
    """Or as much of one as the limit allows: the small model may fill it."""
    answer = client.chat.completions.create(
        **SETTINGS, max_tokens=200, response_format={"type": "json_object"}
    )
    content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert content is not None
    assert content.lstrip().startswith("{")
    assert reason == "length" or isinstance(json.loads(content), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tools_are_called_and_their_arguments_parsed(
    client: openai.OpenAI, choice: Any, stream: bool
) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**SETTINGS, max_tokens=200, **asked) as made:
            answer = made.get_final_completion()
    else:
        answer = client.chat.completions.parse(**SETTINGS, max_tokens=200, **asked)
    (made_choice,) = answer.choices
    assert made_choice.finish_reason == "tool_calls"
    assert made_choice.message.content is None
    (call,) = made_choice.message.tool_calls or ()
    assert call.function.name == "weather"
    assert isinstance(call.function.parsed_arguments, City)


def test_a_form_and_tools_at_once_give_one_of_both(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**SETTINGS, max_tokens=400, response_format=Sum, tools=[TOOL])
    (choice,) = answer.choices
    if choice.message.tool_calls:
        assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, City)
    else:
        assert isinstance(choice.message.parsed, Sum)


@pytest.mark.parametrize(
    ("extra", "matches"),
    [
        ({"guided_regex": "[ab]{3}-[0-9]{2}"}, r"[ab]{3}-[0-9]{2}"),
        ({"guided_choice": ["left (a)", "right"]}, r"left \(a\)|right"),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, r"x[0-9]y"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, r"[0-9]{4}"),
        ({"regex": "a{5}"}, r"a{5}"),
    ],
)
def test_other_servers_constraints_hold(client: openai.OpenAI, extra: dict[str, Any], matches: str) -> None:
    answer = client.chat.completions.create(**SETTINGS, max_tokens=60, extra_body=extra)
    assert answer.choices[0].message.content is not None
    assert re.fullmatch(matches, answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
            "response_format",
        ),
        ({"guided_json": {"$ref": "https://example.org/x"}}, "guided_json"),
    ],
)
def test_a_constraint_that_cannot_hold_is_refused_by_name(
    client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**SETTINGS, max_tokens=9, extra_body=extra)
    assert caught.value.param == param


def test_reasoning_comes_apart_and_the_form_binds_what_follows(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **SETTINGS,
        max_tokens=300,
        logit_bias={_think_end(client): 100},
        extra_body={"guided_regex": "[0-9]{2}", "chat_template_kwargs": {"thinking": True}},
    )
    message = answer.choices[0].message
    assert message.content is not None
    assert message.content.strip().isdigit()
    assert answer.choices[0].finish_reason == "stop"


def _think_end(client: openai.OpenAI) -> str:
    """The token that ends reasoning; a small model would hardly find it by itself."""
    url = str(client.base_url).removesuffix("/v1/") + "/tokenize"
    tokens = httpx.post(url, json={"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    return str(tokens[0])


_SOME: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.5, 1.5]),
    "top_p": st.sampled_from([0.3, 1.0]),
    "top_k": st.sampled_from([-1, 1, 40]),
    "min_p": st.sampled_from([0.0, 0.2]),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7]),
    "logit_bias": st.dictionaries(st.integers(0, 4100).map(str), st.floats(-100, 100), max_size=5),
    "min_tokens": st.integers(0, 8),
    "n": st.integers(1, 3),
    "stop": st.lists(st.sampled_from(["e", " a", "\n", "}"]), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 4095), max_size=3),
    "ignore_eos": st.booleans(),
    "logprobs_mode": st.sampled_from(["raw", "processed"]),
    "include_speculation": st.booleans(),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
    "guided_regex": st.sampled_from(["[a-z ]+", "(", "x", "é*😀"]),
    "guided_json": st.sampled_from([{"type": "array", "maxItems": 2}, {"enum": [1, "ü"]}, {"type": "no"}]),
}


@settings(max_examples=15)
@given(
    some=st.lists(st.sampled_from(sorted(_SOME)), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: _SOME[name] for name in names})
    ),
    logprobs=st.sampled_from([None, 0, 3]),
    echo=st.booleans(),
)
def test_whatever_is_asked_streamed_and_whole_answers_agree(
    client: openai.OpenAI, some: dict[str, Any], logprobs: int | None, echo: bool
) -> None:
    """Or it is refused, both times alike; nothing makes the engine fail."""
    body = {"prompt": "The sum is", "seed": 5, "max_tokens": 8, "logprobs": logprobs, "echo": echo} | some
    url = f"{client.base_url}completions"
    whole = httpx.post(url, json=body, timeout=60)
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=60)
    assert whole.status_code == streamed.status_code
    if whole.status_code != 200:
        assert whole.status_code == 400, whole.text
        return
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines]
    for choice in whole.json()["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if logprobs is not None:
            names = choice["logprobs"].keys()
            joined = {name: [v for c in own if c["logprobs"] for v in c["logprobs"][name]] for name in names}
            assert joined == choice["logprobs"]
