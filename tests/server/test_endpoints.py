"""What stands beside the completions: tokens, health, metrics, version, keys, origins, request ids."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import sys
import threading
from dataclasses import replace
from typing import Any, Literal

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families

import nextn
from nextn.server import traffic
from nextn.text import Tokenizer
from tests.server.fake import FakeEngine, Running, running_server, wait_until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def _figures(running: Running) -> dict[str, float]:
    """Every sample of /metrics by name and labels."""
    answer = httpx.get(running.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@settings(max_examples=15)
@given(text=st.text(max_size=40))
def test_text_becomes_tokens_and_text_again(shared: Running, tokenizer: Tokenizer, text: str) -> None:
    body = {"model": "fake", "prompt": text, "return_token_strs": True}
    made = httpx.post(shared.url + "/tokenize", json=body).json()
    assert made["tokens"] == tokenizer.encode(text)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 256
    plain = httpx.post(shared.url + "/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert plain["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    back = httpx.post(shared.url + "/detokenize", json={"tokens": plain["tokens"]})
    assert back.json() == {"prompt": text}


def test_a_chat_becomes_the_tokens_that_its_answer_would_start_from(engine: FakeEngine) -> None:
    with running_server(engine) as running:
        for more in ({}, {"chat_template_kwargs": {"thinking": True}}):
            made = httpx.post(running.url + "/tokenize", json=CHAT | more).json()
            httpx.post(running.url + "/v1/chat/completions", json=CHAT | more)
            assert made["tokens"] == engine.seen[-1].prompt_tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a"} | CHAT, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"prompt": "a", "x": 1}, "x"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("detokenize", {"tokens": [10**30]}, "tokens.0"),
    ],
)
def test_tokens_of_nothing_sensible_are_refused(
    shared: Running, path: str, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{shared.url}/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    other = httpx.post(f"{shared.url}/{path}", json={"model": "x", "prompt": "a", "tokens": []})
    assert other.status_code in (400, 404)


def test_numbers_that_are_no_token_have_no_text(shared: Running) -> None:
    answer = httpx.post(shared.url + "/detokenize", json={"tokens": [-1, 10**6, 2**62]})
    assert answer.json() == {"prompt": ""}


def test_a_model_without_tokenizer_refuses_to_tokenize(engine: FakeEngine) -> None:
    engine.tokenizer = None
    with running_server(engine) as running:
        for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
            assert httpx.post(f"{running.url}/{path}", json=body).status_code == 400


def test_the_version_is_the_package_s(shared: Running) -> None:
    assert httpx.get(shared.url + "/version").json() == {"version": nextn.__version__}


def test_alive_and_ready_are_told_apart(engine: FakeEngine) -> None:
    """While the server ends it takes nothing more but is alive; with a failed engine it is neither."""
    engine.fail_at = 1
    with running_server(engine) as running:
        running.bridge.on_failure = None  # keep the server up, to look at it
        assert httpx.get(running.url + "/health").json() == {"status": "ok"}
        assert httpx.get(running.url + "/health/live").json() == {"status": "ok"}
        httpx.post(running.url + "/v1/chat/completions", json=CHAT)
        for path in ("/health", "/health/live"):
            answer = httpx.get(running.url + path)
            assert (answer.status_code, answer.json()) == (503, {"status": "engine failed"})


def test_probes_may_ask_with_head(engine: FakeEngine) -> None:
    """Load balancers do; the answer has the status and head of GET's and no body, and needs no key."""
    with running_server(engine, api_key="secret") as running:
        wait_until(lambda: running.bridge.state == "ok")
        for status in (200, 503):
            for path in ("/health", "/health/live"):
                got, headed = httpx.get(running.url + path), httpx.head(running.url + path)
                if path == "/health":
                    assert got.status_code == status
                assert headed.status_code == got.status_code
                assert headed.content == b""
                assert headed.headers["content-length"] == got.headers["content-length"]
            running.bridge.refuse()
        counted = running.bridge.metrics.registry.get_sample_value(
            "nextn_http_responses_total", {"path": "/health", "status": "503"}
        )
        assert counted == 2


def test_the_integrity_check_runs_on_the_engine_s_thread_and_tells_the_counts(engine: FakeEngine) -> None:
    with running_server(engine) as running:
        answer = httpx.get(running.url + "/debug/integrity")
    counts = {"pages": 8, "pages_used": 0, "pages_cached": 0, "pages_free": 0, "running": 0, "waiting": 0}
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"} | counts)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_damage_is_told_and_logged_and_the_server_goes_on(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """What to do about it is for a person to say: requests that are not touched by it still get answers."""
    engine.damage = "page 3 is free and held"
    with caplog.at_level(logging.CRITICAL), running_server(engine) as running:
        answer = httpx.get(running.url + "/debug/integrity")
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "AssertionError: page 3 is free and held"
        assert answer.json()["error"]["code"] == "integrity"
        assert httpx.post(running.url + "/v1/chat/completions", json=CHAT).status_code == 200
    assert "page 3 is free and held" in caplog.text


def test_a_check_between_the_steps_of_open_requests_is_answered(engine: FakeEngine) -> None:
    engine.script = lambda _: [40] * 100_000
    engine.max_model_len = 100_000
    with running_server(engine) as running:
        with httpx.stream("POST", running.url + "/v1/completions", json={"prompt": "a", "stream": True}):
            assert httpx.get(running.url + "/debug/integrity").status_code == 200
        engine.fail_at = engine.steps
        running.bridge.on_failure = None
        httpx.post(running.url + "/v1/completions", json={"prompt": "a"})
        assert httpx.get(running.url + "/debug/integrity").status_code == 503


def test_metrics_count_requests_tokens_and_time(engine: FakeEngine) -> None:
    with running_server(engine) as running:
        before = _figures(running)
        assert before["nextn_time_to_first_token_seconds_count"] == 0
        whole = httpx.post(running.url + "/v1/chat/completions", json=CHAT | {"n": 2}).json()["usage"]
        httpx.post(running.url + "/v1/completions", json={"prompt": "a", "max_tokens": 5})
        httpx.post(running.url + "/v1/completions", json={})
        httpx.get(running.url + "/no/such/path")
        figures = _figures(running)
    generated = whole["completion_tokens"] + 5
    assert figures["nextn_requests_total finish_reason=stop"] == 2
    assert figures["nextn_requests_total finish_reason=length"] == 1
    assert figures["nextn_generated_tokens_total"] == generated
    assert figures["nextn_prompt_tokens_total"] == sum(len(each.prompt_tokens) for each in engine.seen)
    assert figures["nextn_prefix_cache_queries_total"] == figures["nextn_prompt_tokens_total"]
    assert figures["nextn_prefix_cache_hits_total"] == 4  # of the second choice
    assert figures["nextn_time_to_first_token_seconds_count"] == 3
    assert figures["nextn_request_seconds_count"] == 3
    assert figures["nextn_inter_token_seconds_count"] == generated - 3
    assert figures["nextn_inter_token_seconds_sum"] <= figures["nextn_request_seconds_sum"]
    name = "nextn_speculative_accepted_tokens_by_position_total"
    accepted = [figures[f"{name} position={i}"] for i in (1, 2)]
    assert accepted[0] >= accepted[1] > 0
    assert figures["nextn_requests_running"] == figures["nextn_requests_open"] == 0
    assert (figures["nextn_requests_open_limit"], figures["nextn_ready"]) == (8, 1)
    assert figures["nextn_queue_seconds_count"] == 3
    assert figures["nextn_queue_seconds_sum"] <= figures["nextn_time_to_first_token_seconds_sum"]
    assert figures["nextn_step_seconds_count kind=decode"] == engine.steps
    assert figures["nextn_step_tokens_sum kind=decode"] == generated
    assert figures["nextn_step_rows_sum kind=decode"] >= engine.steps
    pages = {f"nextn_cache_pages{which}" for which in ("", "_used", "_cached", "_free")}
    steps = {f"nextn_steps_total kind={kind}" for kind in ("prefill", "decode")}
    process = {"process_resident_memory_bytes", "process_open_fds"} if sys.platform == "linux" else set()
    assert {"nextn_requests_waiting", "nextn_preemptions_total"} | pages | steps | process <= figures.keys()
    assert figures["nextn_http_responses_total path=/v1/completions status=400"] == 1
    assert figures["nextn_http_responses_total path=other status=404"] == 1


def test_accepted_tokens_are_counted_with_the_drafted_ones_not_when_requests_end(engine: FakeEngine) -> None:
    """Their ratio over a window is the acceptance in it."""
    told = {"drafted": 9.0, "accepted": 6.0, "emitted": 9.0, "cycles": 3.0}
    stats = engine.stats
    engine.stats = lambda: {**stats(), **told}  # type: ignore[method-assign]
    with running_server(engine) as running:
        wait_until(lambda: running.bridge.state == "ok")
        figures = _figures(running)
    assert figures["nextn_speculative_accepted_tokens_total"] == 6
    assert figures["nextn_speculative_drafted_tokens_total"] == 9


@pytest.mark.parametrize(("path", "route"), [("/v1/models/x", "/v1/models/{name:path}"), ("/x", "other")])
def test_answers_are_counted_under_their_route_never_under_what_a_client_made_up(
    engine: FakeEngine, path: str, route: str
) -> None:
    with running_server(engine) as running:
        assert httpx.get(running.url + path).status_code == 404
        assert httpx.post(running.url + "/v1/models").status_code == 405
        figures = _figures(running)
    assert figures[f"nextn_http_responses_total path={route} status=404"] == 1
    assert figures["nextn_http_responses_total path=/v1/models status=405"] == 1


@pytest.mark.parametrize("kind", ["logits", "grammar"])
def test_errors_are_counted_by_what_went_wrong(
    engine: FakeEngine, kind: Literal["logits", "grammar"]
) -> None:
    """Damaged weights are no grammar's fault; all causes are there from the start, for alerts on rates."""
    step = engine.step
    with running_server(engine) as running:
        wait_until(lambda: running.bridge.state == "ok")
        before = _figures(running)
        engine.step = lambda: [  # type: ignore[method-assign]
            replace(each, finish_reason="error", error="no", error_kind=kind) for each in step()
        ]
        assert httpx.post(running.url + "/v1/chat/completions", json=CHAT).status_code == 500
        figures = _figures(running)
    causes = {cause: f"nextn_request_errors_total cause={cause}" for cause in ("logits", "grammar", "engine")}
    assert [before[name] for name in causes.values()] == [0, 0, 0]
    assert {cause for cause, name in causes.items() if figures[name]} == {kind}


def test_what_an_engine_s_failure_and_the_server_s_end_cut_off_are_told_apart(engine: FakeEngine) -> None:
    engine.script = lambda _: [40] * 100_000
    engine.max_model_len, engine.step_seconds = 100_000, 0.005
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
    for fails, cause in ((True, "engine"), (False, "shutdown")):
        with running_server(engine, shutdown_timeout=0.0) as running:
            running.bridge.on_failure = None
            with httpx.stream("POST", running.url + "/v1/completions", json=body):
                if fails:
                    engine.fail_at = engine.steps
                else:
                    running.server.end()
                name = f'nextn_request_errors_total{{cause="{cause}"}} 1.0'
                wait_until(lambda name=name: name in running.bridge.metrics.text().decode())
        engine.fail_at, engine._open = None, {}


def test_a_client_that_leaves_is_counted_as_aborted(engine: FakeEngine) -> None:
    engine.script = lambda _: [40] * 100_000
    engine.max_model_len = 100_000
    engine.step_seconds = 0.01
    with running_server(engine) as running:
        with (
            openai.OpenAI(base_url=running.url + "/v1", api_key="x") as client,
            client.completions.create(model="fake", prompt="a", max_tokens=9999, stream=True) as stream,
        ):
            next(iter(stream))
            assert _figures(running)["nextn_requests_running"] == 1
        wait_until(lambda: running.bridge.num_open == 0)
        figures = _figures(running)
        assert figures["nextn_requests_total finish_reason=abort"] == 1
        assert figures["nextn_speculative_accepted_tokens_by_position_total position=1"] > 0


@pytest.mark.parametrize("body_sent", [b'{"pro', b'{"prompt": "a", "max_tokens": 9999}'])
def test_a_client_that_leaves_before_its_answer_is_no_refusal(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, body_sent: bytes
) -> None:
    """In the middle of its body or behind it: 499 in the metric and in the request's own log line."""
    engine.script = lambda _: [40] * 100_000
    engine.max_model_len, engine.step_seconds = 100_000, 0.01
    length = 300 if body_sent == b'{"pro' else len(body_sent)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with caplog.at_level(logging.DEBUG, "nextn.server"), running_server(engine) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body_sent)
            reading = "nextn_requests_reading 1.0" if length == 300 else "nextn_requests_open 1.0"
            wait_until(lambda: reading in running.bridge.metrics.text().decode())
        name = "nextn_http_responses_total path=/v1/completions status="
        wait_until(lambda: f"{name}499" in _figures(running))
        assert [key for key in _figures(running) if key.startswith(name)] == [f"{name}499"]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("nextn.server")]
    assert any("POST '/v1/completions': 499 after" in line for line in lines)
    assert not any(line.startswith("refused") for line in lines)


def test_a_later_metric_joins_the_registry(shared: Running) -> None:
    Gauge("nextn_test_metric", "A test's own.", registry=shared.bridge.metrics.registry).set(7)
    assert _figures(shared)["nextn_test_metric"] == 7


@pytest.mark.parametrize(
    "path", ["/version", "/metrics", "/v1/models", "/openapi.json", "/debug/integrity", "/nothing"]
)
def test_all_but_probes_need_the_key(engine: FakeEngine, path: str) -> None:
    with running_server(engine, api_key="secret") as running:
        assert httpx.get(running.url + path).status_code == 401
        assert httpx.get(running.url + path, headers={"authorization": "Bearer secret"}).status_code != 401
        for probe in ("/health", "/health/live"):
            assert httpx.get(running.url + probe).status_code == 200
        for post in ("/tokenize", "/detokenize", "/v1/completions"):
            assert httpx.post(running.url + post, json={}).status_code == 401


def test_foreign_pages_are_not_let_in_by_default(shared: Running) -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    answer = httpx.options(shared.url + "/v1/completions", headers=headers)
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_named_origins_and_only_those_may_call_with_the_key(engine: FakeEngine) -> None:
    """The browser's own question needs no key; an answer without the right one can be read all the same."""
    with running_server(engine, api_key="k", cors_origins=["https://page.example"]) as running:
        asked = {
            "origin": "https://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        }
        answer = httpx.options(running.url + "/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert (
            httpx.options(
                running.url + "/v1/completions", headers=asked | {"origin": "https://other.example"}
            ).headers.get("access-control-allow-origin")
            is None
        )
        refused = httpx.get(running.url + "/v1/models", headers={"origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        assert refused.headers["access-control-expose-headers"] == "x-request-id"


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing", "/health"])
def test_a_request_s_own_id_comes_back_and_stands_in_errors(shared: Running, path: str) -> None:
    answer = httpx.post(shared.url + path, json={}, headers={"x-request-id": "my-id_1.2:3"})
    assert answer.headers["x-request-id"] == "my-id_1.2:3"
    assert answer.json()["error"]["request_id"] == "my-id_1.2:3"


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"a\tb", "é".encode(), b'"><script>'])
def test_an_id_that_could_harm_is_replaced(shared: Running, given: bytes) -> None:
    answer = httpx.get(shared.url + "/health", headers={"x-request-id": given})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    assert httpx.get(shared.url + "/health").headers["x-request-id"] != answer.headers["x-request-id"]


def test_the_id_stands_in_the_engine_s_request_and_in_the_log(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Given twice it is no conflict: the engine's own ids differ."""
    with caplog.at_level(logging.DEBUG, "nextn.server.middleware"), running_server(engine) as running:
        for stream in (False, True):
            httpx.post(
                running.url + "/v1/chat/completions",
                json=CHAT | {"stream": stream},
                headers={"x-request-id": "twice"},
            )
        assert httpx.get(running.url + "/no%0Athing").status_code == 404
    ids = [request.request_id for request in engine.seen]
    assert len(set(ids)) == 2
    assert all(each.startswith("twice-") for each in ids)
    assert sum("twice POST '/v1/chat/completions': 200" in r.getMessage() for r in caplog.records) == 2
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_an_error_in_a_stream_carries_the_id(engine: FakeEngine) -> None:
    engine.script = lambda _: [40] * 100
    engine.fail_at = 3
    with running_server(engine) as running:
        running.bridge.on_failure = None
        answer = httpx.post(
            running.url + "/v1/chat/completions", json=CHAT | {"stream": True}, headers={"x-request-id": "s"}
        )
    last = [line for line in answer.text.split("\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["request_id"] == "s"


def test_a_defect_is_logged_and_answered_with_the_id(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    engine.check = fails  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.ERROR), running_server(engine) as running:
        answer = httpx.post(running.url + "/v1/chat/completions", json=CHAT, headers={"x-request-id": "d"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "d"
    assert any(record.getMessage().startswith("d failed") for record in caplog.records)
    assert "a defect" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_is_counted_and_its_line_is_a_warning(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Also one behind the start of an answer, whose status has been counted already."""
    name = "EventStream._events" if stream else "WholeAnswer._collect"
    monkeypatch.setattr(f"nextn.server.stream.{name}", lambda _: 1 // 0)
    with caplog.at_level(logging.WARNING), running_server(engine) as running:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(running.url + "/v1/chat/completions", json=CHAT | {"stream": stream})
        figures = _figures(running)
    counted = {name: n for name, n in figures.items() if "responses_total path=/v1/chat" in name}
    status = 200 if stream else 500
    assert counted == {f"nextn_http_responses_total path=/v1/chat/completions status={status}": 1}
    (line,) = [record for record in caplog.records if record.name == "nextn.server.middleware"]
    assert line.levelno == logging.WARNING


def test_refused_requests_are_one_line_now_and_then_and_probes_none(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came since the last line is said at the end."""
    monkeypatch.setattr(traffic, "REFUSALS_EVERY", 0.2)

    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == "nextn.server.traffic"]

    with caplog.at_level(logging.INFO), running_server(engine) as running:
        for _ in range(3):
            httpx.post(running.url + "/v1/completions", json={})
        httpx.get(running.url + "/nothing")
        wait_until(lambda: len(lines()) == 1)
        monkeypatch.setattr(traffic, "REFUSALS_EVERY", 1000.0)
        httpx.get(running.url + "/nothing")
        running.bridge.refuse()
        assert httpx.get(running.url + "/health").status_code == 503
    assert lines() == ["refused: 3 x 400 /v1/completions, 1 x 404 other", "refused: 1 x 404 other"]


def test_a_body_that_does_not_come_is_given_up(engine: FakeEngine) -> None:
    with running_server(engine, body_seconds=0.1) as running:
        host, port = running.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head + b'Content-Length: 300\r\n\r\n{"pro')
            assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
