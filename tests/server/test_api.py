"""The server as the openai client sees it: answers, streams, usage, errors, keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from nextn.text import Tokenizer
from tests.server.conftest import ANSWER
from tests.server.fake import FakeEngine, Running, running_server

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def _chat(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def _text(chunks: Iterator[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_chat_answers_with_text_reason_and_usage(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    prompt = len(tokenizer.render_chat([{"role": "user", "content": "Hi"}]))
    completion = len(tokenizer.encode(ANSWER, add_special_tokens=False)) + 1  # EOS counts
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == completion
    assert answer.usage.total_tokens == prompt + completion


def test_chat_stream_opens_with_the_role_and_ends_with_a_reason(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert _text(iter(chunks)) == ANSWER
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_brings_usage_last_when_asked(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=HELLO)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_defaults_to_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="Hi")
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert ANSWER.startswith(answer.choices[0].text.rstrip("�"))


def test_completion_streams_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="Hi", max_tokens=100, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_completion_takes_token_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="fake", prompt=tokenizer.encode("echo:abc"), max_tokens=9)
    assert answer.choices[0].text == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_give_one_choice_each_in_order(client: openai.OpenAI, stream: bool) -> None:
    prompts = ["echo:first", "echo:the second one", "echo:3"]
    made: Any = client.completions.create(model="fake", prompt=prompts, max_tokens=50, stream=stream)
    texts = ["", "", ""]
    for answer in made if stream else [made]:
        for choice in answer.choices:
            texts[choice.index] += choice.text
    assert texts == ["first", "the second one", "3"]


@pytest.mark.parametrize("stop", ["END", ["###", "END"], ["three", " END two"]])
def test_stop_strings_cut_the_text_streamed_or_not(client: openai.OpenAI, stop: str | list[str]) -> None:
    first = min(ANSWER.find(s) for s in ([stop] if isinstance(stop, str) else stop))
    whole = client.chat.completions.create(model="fake", messages=HELLO, stop=stop)
    assert whole.choices[0].message.content == ANSWER[:first]
    assert whole.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(model="fake", messages=HELLO, stop=stop, stream=True)
    assert _text(iter(chunks)) == ANSWER[:first]


def test_two_requests_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    def ask(text: str) -> str:
        stream = client.chat.completions.create(model="fake", messages=_chat("echo:" + text), stream=True)
        return _text(iter(stream))

    texts = [f"answer number {i} " * 5 for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, texts))
    assert [answer.partition("<")[0] for answer in answers] == texts


def test_every_parameter_reaches_the_engine(tokenizer: Tokenizer, engine: FakeEngine) -> None:
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "chat_template_kwargs": {"thinking": True},
    }
    with (
        running_server(engine) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="x") as client,
    ):
        client.chat.completions.create(
            model="fake",
            messages=[
                {"role": "developer", "content": "Be"},
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
            ],
            max_completion_tokens=11,
            temperature=0.5,
            top_p=0.9,
            frequency_penalty=0.3,
            presence_penalty=-0.3,
            seed=42,
            stop=["q"],
            user="someone",
            metadata={"a": "b"},
            extra_body=extra,
        )
    (request,) = engine.seen
    chat = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
    assert request.prompt_tokens == tokenizer.render_chat(chat, thinking=True)
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (11, 0.5, 0.9, 7)
    assert (params.min_p, params.repetition_penalty, params.seed) == (0.1, 1.5, 42)
    assert (params.frequency_penalty, params.presence_penalty) == (0.3, -0.3)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("q",), (9,), True)


def test_chat_may_fill_the_model_s_length(tokenizer: Tokenizer, engine: FakeEngine) -> None:
    with (
        running_server(engine) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="x") as client,
    ):
        client.chat.completions.create(model="fake", messages=HELLO)
    (request,) = engine.seen
    assert len(request.prompt_tokens) + request.params.max_tokens == engine.max_model_len


@pytest.mark.parametrize(
    ("prompt", "asked", "param"), [(300, None, "prompt"), (256, None, "prompt"), (250, 20, "max_tokens")]
)
def test_what_is_too_long_is_refused_with_the_figures(
    client: openai.OpenAI, prompt: int, asked: int | None, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt=[5] * prompt, max_tokens=asked)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == param
    for figure in (256, prompt, prompt + (asked or 1)):
        assert str(figure) in caught.value.message


def test_models_are_listed_and_looked_up(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    assert client.models.retrieve("alias").owned_by == "nextn"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/name")


def test_answers_carry_the_name_that_was_asked_for(client: openai.OpenAI, shared: Running) -> None:
    assert client.chat.completions.create(model="alias", messages=HELLO).model == "alias"
    unnamed = httpx.post(shared.url + "/v1/completions", json={"prompt": "Hi"})
    assert unnamed.json()["model"] == "fake"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/health", 405),
    ],
)
def test_unknown_paths_and_methods_are_errors_in_openai_s_shape(
    shared: Running, method: str, path: str, status: int
) -> None:
    answer = httpx.request(method, shared.url + path)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code", "request_id"}


def test_health_is_ok_while_requests_are_taken(shared: Running) -> None:
    answer = httpx.get(shared.url + "/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_openapi_describes_the_bodies(shared: Running) -> None:
    """Every reference leads somewhere within the document."""
    document = httpx.get(shared.url + "/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].removeprefix("#/components/schemas/")
        assert "properties" in schemas[name]
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert named <= schemas.keys()
    assert not re.search(r'"#/\$defs', json.dumps(document))


def test_only_the_right_key_is_let_in(engine: FakeEngine) -> None:
    """The key guards everything but /health; what is refused never reaches the engine."""
    with running_server(engine, api_key="söcret") as running:
        url = running.url + "/v1/models"
        for given in ("", "Bearer", "Bearer wrong", "söcret", "Basic söcret", "Bearer söcret2"):
            answer = httpx.get(url, headers={"Authorization": given.encode()})
            assert answer.status_code == 401, given
        assert httpx.get(url).json()["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer"):
            header = {"Authorization": f"{scheme} söcret".encode()}
            assert httpx.get(url, headers=header).status_code == 200
        assert httpx.get(running.url + "/health").status_code == 200
        client = openai.OpenAI(base_url=running.url + "/v1", api_key="wrong", max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="fake", messages=HELLO)
    assert engine.seen == []


def test_a_model_without_tokenizer_takes_token_ids_only(engine: FakeEngine) -> None:
    engine.tokenizer = None
    engine.script = lambda _: [7, 8]
    with (
        running_server(engine) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="x") as client,
    ):
        answer = client.completions.create(model="fake", prompt=[5, 6])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError, match="token ids"):
            client.completions.create(model="fake", prompt="Hi")
