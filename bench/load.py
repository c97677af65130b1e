"""A load of requests and what a user sees of it: lengths, arrivals, latencies, and decode cycles by batch.

`Session` drives an engine in the calling thread, as the server's engine thread does, and keeps a record of
each request. Everything is seen from outside: outputs of `Engine.step`, its statistics and the clock.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from nextn.engine.bench import random_tokens
from nextn.engine.engine import Engine
from nextn.engine.request import Output, Request, SamplingParams

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal length with a given mean, cut to low..high."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), self.low), self.high)


SHAREGPT = (LogNormal(161, 1.3, 4, 2048), LogNormal(338, 0.9, 4, 2048))
"""Prompt and answer like those of ShareGPT's conversations. The means are those that the vLLM paper gives
(Kwon et al. 2023, figure 11); the spreads are chosen: they put the medians at 69 and 225 tokens and the 99th
percentiles at 1,400 and 1,800. Prompt and answer are drawn independently."""


def sharegpt(output_scale: float = 1.0) -> tuple[LogNormal, LogNormal]:
    """Lengths of prompts and answers, the latter `output_scale` times as long."""
    prompt, answer = SHAREGPT
    return prompt, replace(answer, mean=answer.mean * output_scale)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a load: its prompt, and how many tokens to generate."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Point:
    """How requests arrive: `concurrency` are open at any time, or `rate` come a second, by a clock."""

    concurrency: int | None = None
    rate: float | None = None

    def arrivals(self, count: int, seed: int) -> Iterator[float]:
        """Seconds from the start at which each request is due: a Poisson process, or all at once."""
        rng, due = random.Random(seed), 0.0
        for _ in range(count):
            yield due
            due += rng.expovariate(self.rate) if self.rate else 0.0

    @property
    def limit(self) -> float:
        """Most requests open at the same time."""
        return self.concurrency or math.inf

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else f"{self.rate:g} requests/s"


def make_jobs(
    count: int,
    lengths: tuple[LogNormal, LogNormal] | tuple[int, int],
    *,
    vocab: int,
    max_len: int,
    shared_prefix: int = 0,
    seed: int = 0,
    salt: str = "",
) -> list[Job]:
    """Jobs of random tokens, all behind `shared_prefix` common ones; cut so that each fits `max_len`.

    salt: another one gives other tokens of the same lengths.
    """
    rng, words = random.Random(seed), random.Random(f"{seed} {salt}")
    shared = random_tokens(words, shared_prefix, vocab)
    jobs = []
    for _ in range(count):
        tokens_in, tokens_out = (each.draw(rng) if isinstance(each, LogNormal) else each for each in lengths)
        prompt = (shared + random_tokens(words, tokens_in, vocab))[: max_len - 1]
        jobs.append(Job(prompt, min(tokens_out, max_len - len(prompt))))
    return jobs


@dataclass(slots=True)
class Record:
    """One request as its user sees it; times are seconds of `time.perf_counter`.

    due: when it arrived, or should have. times: when tokens came; a speculative step brings several at once.
    cycles, emitted: of speculation. failed: why it ended otherwise than by itself.
    """

    due: float
    prompt_tokens: int
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    cycles: int = 0
    emitted: int = 0
    ended: bool = False
    failed: str | None = None

    @property
    def first_token_s(self) -> float:
        """Time to first token (TTFT), waiting for its turn included."""
        return self.times[0] - self.due

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first (TPOT); None where there is no other."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def gaps(self, start: float = -math.inf, end: float = math.inf) -> list[float]:
        """Seconds from one delivery to the next, of those gaps that lie in start..end at least partly."""
        return [b - a for a, b in pairwise(self.times) if b > start and a < end]


def percentiles(values: Sequence[float], *points: float) -> list[float]:
    """Percentiles in milliseconds of seconds; NaN for no values."""
    if not values:
        return [math.nan] * len(points)
    return [1e3 * float(each) for each in np.percentile(np.asarray(values), points)]


def figures(records: Iterable[Record], seconds: float) -> dict[str, float | None]:
    """Throughput and latencies of a load that took `seconds`; of requests that ended by themselves."""
    everything = list(records)
    good = [each for each in everything if each.failed is None and each.times]
    found: dict[str, float | None] = {
        "requests": len(good),
        "failed": len(everything) - len(good),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "input_tokens_per_s": sum(each.prompt_tokens for each in good) / seconds,
        "output_tokens_per_s": sum(each.tokens for each in good) / seconds,
    }
    samples = {
        "ttft": [each.first_token_s for each in good],
        "tpot": [each.per_token_s for each in good if each.per_token_s is not None],
        "gap": [gap for each in good for gap in each.gaps()],
    }
    for name, values in samples.items():
        found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = percentiles(values, 50, 99)
    cycles = sum(each.cycles for each in good)
    prompt = sum(each.prompt_tokens for each in good)
    found["accept_length"] = sum(each.emitted for each in good) / cycles if cycles else None
    found["cached_share"] = sum(each.cached_tokens for each in good) / prompt if prompt else 0.0
    return found


@dataclass(frozen=True, slots=True)
class Median:
    """Of the decode cycles at one occupancy: how many, their median, and the mean context of the rows."""

    occupancy: int
    cycles: int
    ms: float
    context: float


@dataclass(slots=True)
class Cycles:
    """Decode cycles by occupancy: milliseconds from one result to the next, and the mean context of the rows.

    A cycle counts where a step brought tokens of decoding alone: not where prompt tokens were computed or a
    request's first token came, nor the first one after a pause. Occupancy is the number of rows that got
    tokens.
    """

    samples: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    decode_s: float = 0.0
    other_s: float = 0.0
    _landed: float | None = None

    def pause(self) -> None:
        """What comes next follows on nothing."""
        self._landed = None

    def observe(self, outputs: Sequence[Output], now: float, prefilled: bool) -> float | None:
        """Note what a call of `step` brought; the cycle's milliseconds if it is one."""
        landed, self._landed = self._landed, now
        if landed is None:
            return None
        brought = [each for each in outputs if each.token_ids]
        rows = {each.request_id for each in brought}
        firsts = any(each.completion_tokens == len(each.token_ids) for each in brought)
        if prefilled or firsts or not brought or len(rows) < len(brought):
            self.other_s += now - landed
            return None
        self.decode_s += now - landed
        context = statistics.fmean(each.prompt_tokens + each.completion_tokens for each in brought)
        cycle_ms = (now - landed) * 1e3
        self.samples[len(rows)].append((cycle_ms, context))
        return cycle_ms

    @property
    def decode_share(self) -> float:
        """Part of the time between results that ended in a decode cycle."""
        return self.decode_s / (self.decode_s + self.other_s) if self.decode_s else 0.0

    def medians(self, at_least: int) -> list[Median]:
        """The occupancies with so many cycles, in order."""
        return [
            Median(
                rows,
                len(seen),
                statistics.median(ms for ms, _ in seen),
                statistics.fmean(context for _, context in seen),
            )
            for rows, seen in sorted(self.samples.items())
            if len(seen) >= at_least
        ]


def prefill_counters(stats: Mapping[str, float]) -> tuple[float, float]:
    """What changes when prompt tokens are computed."""
    return stats["prompt_tokens"], stats.get("prefill_steps", 0.0)


class Session:
    """An engine driven by the calling thread, and a record of every request."""

    def __init__(self, engine: Engine, temperature: float = 0.0, name: str = "load") -> None:
        self.engine = engine
        self.cycles = Cycles()
        self.records: dict[str, Record] = {}
        self.open: dict[str, Record] = {}
        self._temperature, self._name = temperature, name
        self._salt = secrets.token_hex(8)  # of its own: no session finds what another one has computed
        self._prefilled = prefill_counters(engine.stats())

    def add(self, job: Job, due: float | None = None) -> str:
        """Queue a job now; `due` is when it should have come. Its tokens end with their number alone."""
        request_id = f"{self._name}-{len(self.records)}"
        params = SamplingParams(max_tokens=job.output_len, temperature=self._temperature, ignore_eos=True)
        record = Record(time.perf_counter() if due is None else due, len(job.prompt))
        self.engine.add(Request(request_id, job.prompt, params, cache_salt=self._salt))
        self.records[request_id] = self.open[request_id] = record
        return request_id

    def step(self) -> None:
        """One step of the engine, if it has work."""
        if not self.engine.has_work():
            self.cycles.pause()
            return
        outputs = self.engine.step()
        now = time.perf_counter()
        before, self._prefilled = self._prefilled, prefill_counters(self.engine.stats())
        self.cycles.observe(outputs, now, before != self._prefilled)
        for output in outputs:
            self._take(output, now)

    def drain(self) -> None:
        """Step until nothing is open."""
        while self.open or self.engine.has_work():
            self.step()
        self.cycles.pause()

    def abort(self) -> None:
        """End what is open."""
        for request_id in list(self.open):
            self.engine.abort(request_id)
        self.drain()

    def _take(self, output: Output, now: float) -> None:
        record = self.open[output.request_id]
        if output.token_ids:
            record.times.append(now)
            record.tokens += len(output.token_ids)
        if output.finish_reason is not None:
            del self.open[output.request_id]
            record.ended = True
            record.cached_tokens = output.cached_tokens
            record.cycles, record.emitted = output.acceptance.cycles, output.acceptance.emitted
            if output.finish_reason in ("abort", "error"):
                record.failed = output.error or output.finish_reason


class Run:
    """A load on an engine from its first request to its last."""

    def __init__(self, session: Session, jobs: Sequence[Job], point: Point, seed: int) -> None:
        self.session = session
        self.started = time.perf_counter()
        self._jobs, self._point = jobs, point
        self._due = [self.started + offset for offset in point.arrivals(len(jobs), seed)]
        self._sent, self._said = 0, self.started

    @property
    def ended(self) -> int:
        """Requests that are done."""
        return self._sent - len(self.session.open)

    @property
    def is_done(self) -> bool:
        """Whether all requests have ended."""
        return self.ended == len(self._jobs)

    def finish(self) -> float:
        """Go on to the end; the seconds since the start."""
        while not self.is_done:
            self.advance()
        seconds = time.perf_counter() - self.started
        self.session.drain()
        return seconds

    def advance(self) -> None:
        """Send what is due, then one step, or a pause until the next request where there is nothing to do."""
        now = time.perf_counter()
        while self._may_send(now):
            # In a closed loop a request is due when its turn comes.
            self.session.add(
                self._jobs[self._sent], None if self._point.concurrency else self._due[self._sent]
            )
            self._sent += 1
        if self.session.engine.has_work():
            self.session.step()
        elif self._sent < len(self._jobs):
            self.session.cycles.pause()
            time.sleep(max(0.0, self._due[self._sent] - now))
        if now - self._said > PROGRESS_S:
            self._said = now
            self._progress(now - self.started)

    def _may_send(self, now: float) -> bool:
        has_one = self._sent < len(self._jobs) and self._due[self._sent] <= now
        return has_one and len(self.session.open) < self._point.limit

    def _progress(self, seconds: float) -> None:
        tokens = sum(each.tokens for each in self.session.records.values())
        stats = self.session.engine.stats()
        logger.info(
            "%5.0f s: %d of %d done, %d running, %d waiting, %.0f tokens/s",
            seconds,
            self.ended,
            len(self._jobs),
            stats["running"],
            stats["waiting"],
            tokens / seconds,
        )
