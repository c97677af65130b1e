"""Fixtures of the server's tests: a tokenizer, a scripted engine, a server for tests that leave it be."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from nextn.engine.request import Request
from nextn.text import Tokenizer
from tests.server.byte_bpe import write_tokenizer
from tests.server.fake import FakeEngine, Running, Script, running_server

ANSWER = "Hello, naïve 世界 😀! One END two ### three."


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def script(tokenizer: Tokenizer) -> Script:
    """Echo what follows 'echo:' in the prompt, else give the fixed answer."""

    def answer(request: Request) -> list[int]:
        prompt = tokenizer.decode(request.prompt_tokens)
        _, found, rest = prompt.partition("echo:")
        return tokenizer.encode(rest if found else ANSWER, add_special_tokens=False)

    return answer


@pytest.fixture
def engine(tokenizer: Tokenizer, script: Script) -> FakeEngine:
    return FakeEngine(tokenizer, script)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer, script: Script) -> Iterator[Running]:
    with running_server(FakeEngine(tokenizer, script), names=("fake", "alias")) as running:
        yield running


@pytest.fixture
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
