"""Prometheus metrics: one registry, to which anything that serves requests adds its own.

Latencies are what the server sees: from the moment that a request is handed to the engine to the moment that
its text is handed to the connection. What the engine counts itself is read when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nextn.engine.request import Output
from nextn.engine.stats import Acceptance

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_NEXT_TOKEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
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
}
_STEPS = {"prefill_steps": "prefill", "decode_steps": "decode"}


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
        self.registry.register(_EngineCollector(self))
        self._requests = self._counter("nextn_requests", "Requests that have ended.", "finish_reason")
        self._responses = self._counter("nextn_http_responses", "HTTP answers.", "path", "status")
        self._prompt = self._counter("nextn_prompt_tokens", "Prompt tokens of requests that have started.")
        self._queried = self._counter(
            "nextn_prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = self._counter("nextn_prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._generated = self._counter("nextn_generated_tokens", "Tokens generated.")
        self._accepted = self._counter(
            "nextn_speculative_accepted_tokens",
            "Draft tokens accepted by requests that have ended, by their depth in the tree.",
            "position",
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

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer; `path` is a route, never what a client made up."""
        self._responses.labels(path, str(status)).inc()

    def record(self, output: Output, latency: Latency, now: float) -> None:
        """Count an output of the engine."""
        count = len(output.token_ids)
        if count:
            if latency.last is None:
                self._prompt.inc(output.prompt_tokens)
                self._queried.inc(output.prompt_tokens)
                self._hits.inc(output.cached_tokens)
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

    def _accept(self, acceptance: Acceptance) -> None:
        for position, count in enumerate(acceptance.accepted_by_position, start=1):
            self._accepted.labels(str(position)).inc(count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)


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
