"""A scripted engine, and the real server around it on a free port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from nextn.engine.grammar import Grammars
from nextn.engine.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from nextn.engine.stats import StepReport
from nextn.errors import RequestError
from nextn.server.app import create_app
from nextn.server.bridge import Bridge
from nextn.server.connection import Connection
from nextn.server.process import Server
from nextn.text import Detokenizer, Tokenizer

Script = Callable[[Request], list[int]]
STATS = (
    *("running", "waiting", "generated_tokens", "prompt_tokens", "cycles", "emitted", "accepted", "drafted"),
    *("pages", "pages_used", "pages_cached", "pages_free", "prefill_steps", "decode_steps", "preemptions"),
)


@dataclass(eq=False)
class _Open:
    request: Request
    tokens: list[int]
    detokenizer: Detokenizer | None


@dataclass(eq=False)
class FakeEngine:
    """Emits `script(request)` in runs of `run_length` tokens, then EOS; `fail_at` counts steps."""

    tokenizer: Tokenizer | None
    script: Script
    run_length: int = 3
    max_model_len: int = 256
    step_seconds: float = 0.0
    fail_at: int | None = None
    steps: int = 0
    looks: int = 0
    closed: bool = False
    damage: str = ""
    grammars: Grammars | None = None
    on_step: Callable[[StepReport], None] = field(default=lambda _: None)
    on_start: Callable[[str], None] = field(default=lambda _: None)
    queried_tokens: int = 0
    cached_tokens: int = 0
    aborted: list[str] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    _open: dict[str, _Open] = field(default_factory=dict)
    _ended: list[Output] = field(default_factory=list)

    def check(self, prompt_tokens: list[int], params: SamplingParams) -> None:
        if not prompt_tokens:
            raise RequestError("the prompt is empty", "prompt")
        if not all(0 <= token < 500 for token in prompt_tokens):
            raise RequestError("the prompt has a token id outside 0..499", "prompt")
        if len(prompt_tokens) + params.max_tokens > self.max_model_len:
            raise RequestError("too long", "prompt")
        if any(token >= 500 for token, _ in params.logit_bias):
            raise RequestError("logit_bias has a token id outside 0..499", "logit_bias")

    def add(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        self.check(request.prompt_tokens, request.params)
        detokenizer = Detokenizer(self.tokenizer, request.params.stop) if self.tokenizer else None
        self._open[request.request_id] = _Open(request, self.script(request), detokenizer)
        self.seen.append(request)

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        opened = self._open.pop(request_id, None)
        if opened is not None:
            self.aborted.append(request_id)
            self._ended.append(_output(opened.request, "", [], "abort"))

    def has_work(self) -> bool:
        self.looks += 1
        return bool(self._open or self._ended)

    def step(self) -> list[Output]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.fail_at is not None and self.steps >= self.fail_at:
            raise RuntimeError("the device is on fire")
        time.sleep(self.step_seconds)
        outputs, self._ended = self._ended, []
        rows = list(self._open.values())
        for opened in rows:
            if not opened.request.output_tokens:
                self._start(opened.request)
        advanced = [self._advance(opened) for opened in rows]
        tokens = sum(len(output.token_ids) for output in advanced)
        self.on_step(StepReport("decode", len(rows), tokens, self.step_seconds))
        return outputs + advanced

    def stats(self) -> Mapping[str, float]:
        counted = {"queried_tokens": self.queried_tokens, "cached_tokens": self.cached_tokens}
        return dict.fromkeys(STATS, 0.0) | {"running": float(len(self._open)), "pages": 8.0} | counted

    def check_integrity(self) -> None:
        self.threads.add(threading.get_ident())
        assert not self.damage, self.damage

    def close(self) -> None:
        self.closed = True

    def _start(self, request: Request) -> None:
        self.queried_tokens += len(request.prompt_tokens)
        self.cached_tokens += _cached(request)
        self.on_start(request.request_id)

    def _advance(self, opened: _Open) -> Output:
        request, start = opened.request, len(opened.request.output_tokens)
        text, reason, taken = "", None, []
        for token in opened.tokens[start : start + self.run_length] or [1]:
            taken.append(token)
            request.output_tokens.append(token)
            piece, reason = self._take(opened, token)
            text += piece
            if reason is not None:
                del self._open[request.request_id]
                break
        request.acceptance.record(len(taken), self.run_length)
        return _output(request, text, taken, reason)

    def _take(self, opened: _Open, token: int) -> tuple[str, FinishReason | None]:
        detokenizer, params = opened.detokenizer, opened.request.params
        may_stop = len(opened.request.output_tokens) > params.min_tokens
        if may_stop and (token == 1 or token in params.stop_token_ids):
            return detokenizer.flush() if detokenizer else "", "stop"
        text = detokenizer.push(token, may_stop=may_stop) if detokenizer else ""
        if detokenizer and detokenizer.stopped is not None:
            return text, "stop"
        if len(opened.request.output_tokens) >= params.max_tokens:
            return text + (detokenizer.flush() if detokenizer else ""), "length"
        return text, None


def _output(request: Request, text: str, tokens: list[int], reason: FinishReason | None) -> Output:
    params, first = request.params, len(request.output_tokens) == len(tokens)
    begun: list[TokenLogprobs | None] = [None]
    echoed = begun + [logprobs_of(token, params.prompt_logprobs or 0) for token in request.prompt_tokens[1:]]
    return Output(
        request.request_id,
        text,
        tuple(tokens),
        len(request.prompt_tokens),
        len(request.output_tokens),
        finish_reason=reason,
        acceptance=request.acceptance,
        logprobs=() if params.logprobs is None else tuple(logprobs_of(t, params.logprobs) for t in tokens),
        prompt_logprobs=tuple(echoed) if first and params.prompt_logprobs is not None else None,
        cached_tokens=_cached(request),
    )


def _cached(request: Request) -> int:
    return 4 * (request.choice > 0)


def logprobs_of(token: int, top: int) -> TokenLogprobs:
    """What the scripted engine says of a token; one alternative is impossible."""
    others = tuple((number, -0.5 * number) for number in range(top))
    return TokenLogprobs(token, -token / 8, (*others[:-1], (499, float("-inf"))) if top > 1 else others)


@dataclass
class Running:
    """A server that listens, and its parts."""

    url: str
    bridge: Bridge
    server: Server


@contextmanager
def running_server(
    engine: Any,
    *,
    names: tuple[str, ...] = ("fake",),
    max_open: int = 8,
    load: Callable[[], Any] | None = None,
    shutdown_timeout: float = 5.0,
    **app_options: Any,
) -> Iterator[Running]:
    """The whole server in a thread of its own, on loopback; it is shut down at the end."""
    bridge = Bridge(engine, load=load, max_open=max_open)
    app = create_app(bridge, names, **app_options)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=Connection, log_config=None, log_level="warning"
    )
    server = Server(config, bridge, "ready at {url}", shutdown_timeout)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", bridge, server)
    finally:
        server.end()
        thread.join(30)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll; fail the test when it takes absurdly long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)
