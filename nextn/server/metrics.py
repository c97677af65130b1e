"""Prometheus metrics: one registry, to which anything that serves requests adds its own.

Latencies are what the server sees: they begin when a request is handed to the engine, after its body was
read and tokenized and its grammar compiled, and end when an output is there for whoever writes the answer,
before it is written. What the engine counts itself is read when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nextn.engine.grammar import Grammars
from nextn.engine.request import ErrorKind, Output
from nextn.engine.stats import Acceptance, StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_NEXT_TOKEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_QUEUED = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 200, 600)
_STEP = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20, 100)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COMPILE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
_WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

_GAUGES = {
    "running": ("nextn_requests_running", "Requests that the engine decodes or prefills."),
    "waiting": ("nextn_requests_waiting", "Requests that wait for a row or for pages."),
    "pages": ("nextn_cache_pages", "Pages of the cache."),
    "pages_used": ("nextn_cache_pages_used", "Pages that running requests hold."),
    "pages_cached": ("nextn_cache_pages_cached", "Pages kept for later requests, until others need them."),
    "pages_free": ("nextn_cache_pages_free", "Pages that hold nothing."),
    "accept_length": (
        "nextn_acceptance_length",
        "Mean tokens a speculative cycle since the start, bonus included.",
    ),
}
_COUNTERS = {
    "preemptions": ("nextn_preemptions", "Requests that lost their pages to others and were resumed."),
    "prompt_tokens": ("nextn_prefilled_tokens", "Tokens prefilled, those of resumed requests once more."),
    "cycles": ("nextn_speculative_cycles", "Cycles of draft and verification."),
    "emitted": ("nextn_speculative_emitted_tokens", "Tokens that cycles brought, bonus included."),
    "drafted": ("nextn_speculative_drafted_tokens", "Draft tokens verified."),
    "accepted": ("nextn_speculative_accepted_tokens", "Draft tokens accepted."),
    "queried_tokens": ("nextn_prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "cached_tokens": ("nextn_prefix_cache_hits", "Prompt tokens found in the prefix cache."),
}
_STEPS = {"prefill_steps": "prefill", "decode_steps": "decode"}

ErrorCause = ErrorKind | Literal["shutdown", "engine"]
"""Why a request ended with an error: what the engine says, the server's end, or the engine's own failure."""


class Latency:
    """When one open request was handed over, and when its last tokens came."""

    __slots__ = ("last", "started")

    def __init__(self, started: float) -> None:
        self.started = started
        self.last: float | None = None


class Metrics:
    """What the server counts. `registry` is its own, so that several servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine_stats: Callable[[], Mapping[str, float]] = dict
        """Gives the engine's statistics, from any thread."""
        self.grammars: Grammars | None = None
        """The engine's."""
        self.turned_away = 0
        """Answers with status 429."""
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(self))
        self._count_requests()
        self._count_tokens()
        self._time_requests()
        self._time_engine()

    def _count_requests(self) -> None:
        self._requests = self._counter("nextn_requests", "Requests that have ended.", "finish_reason")
        self._errors = self._counter("nextn_request_errors", "Requests that ended with an error.", "cause")
        for cause in (*get_args(ErrorKind), "shutdown", "engine"):
            self._errors.labels(cause)  # a rate needs the 0 before the first
        self._responses = self._counter("nextn_http_responses", "HTTP answers.", "path", "status")
        self._unread = self._counter("nextn_slow_readers", "Answers given up as their clients did not read.")

    def _count_tokens(self) -> None:
        self._prompt = self._counter("nextn_prompt_tokens", "Prompt tokens of requests that have started.")
        self._generated = self._counter("nextn_generated_tokens", "Tokens generated.")
        self._accepted = self._counter(
            "nextn_speculative_accepted_tokens_by_position",
            "Draft tokens accepted by requests that have ended, by their depth in the tree.",
            "position",
        )

    def _time_requests(self) -> None:
        self._queued = self._histogram(
            "nextn_queue_seconds", "From a request to the launch of its first prefill step.", _QUEUED
        )
        self._first_token = self._histogram(
            "nextn_time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN
        )
        self._next_token = self._histogram(
            "nextn_inter_token_seconds",
            "Between tokens; those of one step share the time since the step before.",
            _NEXT_TOKEN,
        )
        self._whole = self._histogram("nextn_request_seconds", "From a request to its last token.", _WHOLE)

    def _time_engine(self) -> None:
        self._step = self._histogram(
            "nextn_step_seconds",
            "What a step took, where steps overlap from the end of the one before.",
            _STEP,
            "kind",
        )
        self._rows = self._histogram("nextn_step_rows", "Requests in a step.", _ROWS, "kind")
        self._tokens = self._histogram(
            "nextn_step_tokens", "Tokens that a step prefilled, or brought by decoding.", _TOKENS, "kind"
        )
        self._compile = self._histogram(
            "nextn_grammar_compile_seconds",
            "What grammars took to compile, those refused included.",
            _COMPILE,
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge whose value is asked for when somebody reads it."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def identify(self, labels: Mapping[str, str]) -> None:
        """Say what is served."""
        Gauge("nextn_info", "What is served, as labels.", list(labels), registry=self.registry).labels(
            **labels
        ).set(1)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer; `path` is a route, never what a client made up."""
        self._responses.labels(path, str(status)).inc()
        self.turned_away += status == 429

    def slow_reader(self) -> None:
        """Count an answer that was given up because nobody read it."""
        self._unread.inc()

    def started(self, seconds: float) -> None:
        """Count a request's time in the queue; on the engine's thread."""
        self._queued.observe(seconds)

    def stepped(self, step: StepReport) -> None:
        """Count a step of the engine; on its thread."""
        self._step.labels(step.kind).observe(step.seconds)
        self._rows.labels(step.kind).observe(step.rows)
        self._tokens.labels(step.kind).observe(step.tokens)

    def compiled(self, seconds: float) -> None:
        """Count a grammar; on the thread that compiled it."""
        self._compile.observe(seconds)

    def record(self, output: Output, latency: Latency, now: float, cause: ErrorCause) -> None:
        """Count an output of the engine; `cause`: of its error, if there is one and it does not say."""
        count = len(output.token_ids)
        if count:
            if latency.last is None:
                self._prompt.inc(output.prompt_tokens)
                self._first_token.observe(now - latency.started)
                later = count - 1  # they came with the first one
                between = 0.0
            else:
                later, between = count, (now - latency.last) / count
            for _ in range(later):
                self._next_token.observe(between)
            latency.last = now
            self._generated.inc(count)
        if output.finish_reason is not None:
            self._requests.labels(output.finish_reason).inc()
            self._whole.observe(now - latency.started)
            self._accept(output.acceptance)
        if output.finish_reason == "error":
            self._errors.labels(output.error_kind or cause).inc()

    def _accept(self, acceptance: Acceptance) -> None:
        for position, count in enumerate(acceptance.accepted_by_position, start=1):
            self._accepted.labels(str(position)).inc(count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """What the engine counts; a figure that it does not give is left out."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.engine_stats()
        for key, (name, text) in _GAUGES.items():
            if key in stats:
                yield GaugeMetricFamily(name, text, stats[key])
        for key, (name, text) in _COUNTERS.items():
            if key in stats:
                yield CounterMetricFamily(name, text, stats[key])
        steps = CounterMetricFamily("nextn_steps", "Steps of the engine.", labels=["kind"])
        for key, kind in _STEPS.items():
            if key in stats:
                steps.add_metric([kind], stats[key])
        yield steps
        if (grammars := self._metrics.grammars) is not None:
            yield GaugeMetricFamily(
                "nextn_grammars_queued", "Grammars that wait for their turn to be compiled.", grammars.queued
            )
            text = "Grammars of no use, that took too long, or whose turn did not come."
            refused = CounterMetricFamily("nextn_grammars_refused", text, labels=["reason"])
            for reason, count in grammars.refused.items():
                refused.add_metric([reason], count)
            yield refused
