"""Grammars on their way through the server: who waits for them, and what is said where none comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import nextn.engine.grammar as grammar_module
from nextn.engine.grammar import MAX_CACHED, Grammar, Grammars, GrammarsBusy, Vocabulary
from nextn.errors import RequestError
from tests.grammars import VOCABULARY
from tests.server.fake import FakeEngine, running_server, wait_until


@contextmanager
def _held() -> Iterator[tuple[Grammars, threading.Event]]:
    """Grammars that are not compiled before the event, or the end."""
    release = threading.Event()

    def vocabulary() -> Vocabulary:
        release.wait(30)
        return VOCABULARY

    try:
        yield Grammars(vocabulary), release
    finally:
        release.set()


def _with(engine: FakeEngine, grammars: Grammars) -> FakeEngine:
    engine.grammars = grammars
    return engine


def _regex(number: int) -> dict[str, Any]:
    return {"prompt": "a", "guided_regex": f"a{{1,{number + 1}}}"}


def test_slow_grammars_hold_up_no_request_without_one(engine: FakeEngine) -> None:
    """However many wait: asyncio has few threads, in which everybody's text is tokenized."""
    with _held() as (grammars, release), running_server(_with(engine, grammars), max_open=100) as running:
        url = running.url + "/v1/completions"
        with ThreadPoolExecutor(40) as pool:
            asked = [pool.submit(httpx.post, url, json=_regex(i), timeout=60) for i in range(40)]
            wait_until(lambda: grammars.queued >= 38)
            for _ in range(5):
                assert httpx.post(url, json={"prompt": "a"}, timeout=3).status_code == 200
            figures = httpx.get(running.url + "/metrics").text
            assert "nextn_grammars_queued 38.0" in figures
            release.set()
            assert [each.result().status_code for each in asked] == [200] * 40
        figures = httpx.get(running.url + "/metrics").text
        assert "nextn_grammars_queued 0.0" in figures
        assert "nextn_grammar_compile_seconds_count 40.0" in figures


def test_a_grammar_whose_turn_does_not_come_is_told_apart_from_one_that_takes_long(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second is the client's fault."""
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.3)
    with _held() as (grammars, _), running_server(_with(engine, grammars)) as running:
        url = running.url + "/v1/completions"
        with ThreadPoolExecutor(2) as pool:
            slow = list(pool.map(lambda i: httpx.post(url, json=_regex(i), timeout=60), range(2)))
        late = httpx.post(url, json=_regex(2), timeout=60)
        figures = httpx.get(running.url + "/metrics").text
    for answer in slow:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "guided_regex")
        assert "took more than 0.3 s to compile" in error["message"]
    assert (late.status_code, late.headers["retry-after"]) == (429, "10")
    assert "wait to be compiled" in late.json()["error"]["message"]
    assert 'nextn_grammars_refused_total{reason="time"} 2.0' in figures
    assert 'nextn_grammars_refused_total{reason="queue"} 1.0' in figures
    assert 'nextn_grammars_refused_total{reason="invalid"} 0.0' in figures


def test_all_answers_of_a_request_have_their_places_while_its_grammar_is_compiled(
    engine: FakeEngine,
) -> None:
    """They are known by then; others that come meanwhile could not be taken with them."""
    with _held() as (grammars, release), running_server(_with(engine, grammars), max_open=4) as running:
        url = running.url + "/v1/completions"
        with ThreadPoolExecutor(1) as pool:
            body = _regex(0) | {"prompt": ["a", "b"], "n": 2}
            asked = pool.submit(httpx.post, url, json=body, timeout=60)
            wait_until(lambda: "nextn_requests_reading 4.0" in running.bridge.metrics.text().decode())
            assert httpx.post(url, json={"prompt": "a"}).status_code == 429
            release.set()
            assert asked.result().status_code == 200
        assert httpx.post(url, json={"prompt": "a"}).status_code == 200
        assert "nextn_requests_reading 0.0" in running.bridge.metrics.text().decode()


def test_time_in_the_queue_is_not_held_against_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its whole time from when its turn comes."""
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.5)
    grammars = Grammars(lambda: VOCABULARY)
    build = grammars._build

    def slow(grammar: Grammar) -> Any:
        time.sleep(0.35)
        return build(grammar)

    monkeypatch.setattr(grammars, "_build", slow)
    begun = [grammars.begin(Grammar("regex", f"a{{1,{i + 1}}}")) for i in range(4)]
    for compiling in begun:
        while seconds := compiling.patience():
            assert seconds <= 0.5
            time.sleep(min(seconds, 0.01))
        compiling.outcome()


def test_the_queue_of_grammars_is_bounded_and_a_known_one_needs_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_QUEUED", 3)
    with _held() as (grammars, release):
        begun = [grammars.begin(Grammar("regex", f"a{{1,{i + 1}}}")) for i in range(2)]
        wait_until(lambda: grammars.queued == 0)
        begun += [grammars.begin(Grammar("regex", f"a{{1,{i + 1}}}")) for i in range(2, 5)]
        with pytest.raises(GrammarsBusy):
            grammars.begin(Grammar("regex", "b"))
        assert grammars.begin(Grammar("regex", "a{1,5}")).future is begun[-1].future
        assert (grammars.queued, grammars.refused["queue"]) == (3, 1)
        release.set()
        for compiling in begun:
            compiling.future.result(20)
        assert grammars.queued == 0
        assert grammars.compile(Grammar("regex", "b"))


def test_a_grammar_of_no_use_is_counted_and_refused_over_http_with_its_field(engine: FakeEngine) -> None:
    engine.grammars = Grammars(lambda: VOCABULARY)
    with running_server(engine) as running:
        answer = httpx.post(running.url + "/v1/completions", json={"prompt": "a", "guided_regex": "("})
        figures = httpx.get(running.url + "/metrics").text
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
    assert 'nextn_grammars_refused_total{reason="invalid"} 1.0' in figures
    with pytest.raises(RequestError, match="cannot be used"):
        engine.grammars.compile(Grammar("regex", "("))


def test_the_engine_s_own_refusal_of_a_grammar_names_the_body_s_field(engine: FakeEngine) -> None:
    """It is asked before the grammar is compiled."""

    def refuse(_: object, params: Any) -> None:
        if params.grammar is not None:
            raise RequestError("no end-of-sequence token", "grammar")

    engine.check = refuse  # type: ignore[method-assign]
    with running_server(engine) as running:
        for path, prompt in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = httpx.post(f"{running.url}/v1/{path}", json=prompt | {"guided_regex": "a"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
    assert engine.seen == []


def test_a_grammar_is_compiled_once_however_many_others_come_meanwhile(engine: FakeEngine) -> None:
    """More than are kept wait together; each request gets what its own turn has brought."""
    seconds: list[float] = []
    count = MAX_CACHED + 20
    with _held() as (grammars, release), running_server(_with(engine, grammars), max_open=100) as running:
        grammars.on_compiled = seconds.append
        url = running.url + "/v1/completions"
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(httpx.post, url, json=_regex(i), timeout=60) for i in range(count)]
            wait_until(lambda: grammars.queued >= count - 2)
            release.set()
            assert [each.result().status_code for each in asked] == [200] * count
    assert len(seconds) == count
    assert all(request.compiled is not None for request in engine.seen)
