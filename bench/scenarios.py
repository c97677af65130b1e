"""Two questions that averages hide: what a long prompt does to others, and what a cached one saves."""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load import Job, Record, Session, percentiles
from nextn.engine.bench import environment, random_tokens
from nextn.engine.engine import Engine
from nextn.errors import ConfigError

logger = logging.getLogger(__name__)

GAP_TARGET_MS, SPEED_TARGET, HIT_TARGET_MS = 250.0, 0.70, 50.0
"""On one H200: the 99th percentile of the streams' gaps while a long prompt is computed, the part of its own
speed that it keeps, and what a hit may cost beyond its new tokens."""
SETTLED = 30
"""Deliveries of each stream before the long prompt comes."""


def long_prompt(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Streams decode, a long prompt comes: its speed alone and among them, and their gaps meanwhile."""
    length, vocab = args.long_prompt, engine.worker.models.cfg.vocab_size
    _check_fits(engine, args, "long_prompt")
    _check_fits(engine, args, "stream_prompt")
    rng, session = random.Random(args.seed), Session(engine, args.temperature, "long-prompt")
    # It also tells the engine how fast it computes prompts.
    alone = first_token_s(session, random_tokens(rng, length, vocab))
    logger.info("alone: %d tokens in %.2f s, %.0f tokens/s", length, alone, length / alone)

    answer = min(args.stream_tokens, engine.max_model_len - args.stream_prompt)
    ids = [
        session.add(Job(random_tokens(rng, args.stream_prompt, vocab), answer)) for _ in range(args.streams)
    ]
    streams = [session.records[each] for each in ids]
    while min(len(each.times) for each in streams) < SETTLED:
        _step(session, streams)
    quiet = [gap for each in streams for gap in each.gaps()[2:]]
    began = time.perf_counter()
    long_id = session.add(Job(random_tokens(rng, length, vocab), 1))
    while long_id in session.open:
        _step(session, streams)
    ended = time.perf_counter()
    while min(each.times[-1] for each in streams) < ended:  # the last chunk's gap ends after it
        _step(session, streams)
    among = session.records[long_id].first_token_s
    session.abort()
    gaps = [gap for each in streams for gap in each.gaps(began, ended)]
    result = {
        "kind": "long-prompt",
        **environment(engine),
        "spec": str(engine.spec or "plain"),
        "prompt_tokens": length,
        "streams": args.streams,
        "alone_tokens_per_s": round(length / alone, 1),
        "among_tokens_per_s": round(length / among, 1),
        "speed_kept": round(alone / among, 4),
        "gaps": len(gaps),
    }
    for name, values in (("quiet_gap", quiet), ("gap", gaps)):
        for part, value in zip(("p50", "p99", "max"), percentiles(values, 50, 99, 100), strict=True):
            result[f"{name}_{part}_ms"] = round(value, 3)
    _print_long_prompt(result)
    return result


def _print_long_prompt(result: dict[str, Any]) -> None:
    kept, p99 = result["speed_kept"], result["gap_p99_ms"]
    print(
        f"prompt of {result['prompt_tokens']} tokens: {result['alone_tokens_per_s']:.0f} tokens/s alone, "
        f"{result['among_tokens_per_s']:.0f} among {result['streams']} streams, {kept:.1%} "
        f"{verdict(kept >= SPEED_TARGET, f'>= {100 * SPEED_TARGET:.0f} %')}"
    )
    for name, when in (("quiet_gap", "before"), ("gap", "meanwhile")):
        figures = " ".join(f"{part} {result[f'{name}_{part}_ms']:.1f}" for part in ("p50", "p99", "max"))
        print(f"gaps of the streams {when}, ms: {figures}")
    within = verdict(p99 <= GAP_TARGET_MS, f"p99 <= {GAP_TARGET_MS:.0f} ms")
    print(f"{result['gaps']} gaps meanwhile {within}", flush=True)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Requests of one kind, behind what prefix: median time to first token, fewest and most cached tokens."""

    ms: float
    cached: tuple[int, int]


def prefix_hit(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Time to first token behind a prompt that is cached, behind one that is not, of the new tokens alone."""
    length, vocab = args.shared_prompt, engine.worker.models.cfg.vocab_size
    _check_fits(engine, args, "shared_prompt", "new_tokens")
    rng, session = random.Random(args.seed), Session(engine, args.temperature, "prefix-hit")

    def several(prefix: Callable[[], list[int]]) -> _Kind:
        """The first request is not counted: it compiles, and fills the cache with a shared prefix."""
        times, cached = [], []
        for _ in range(args.repeats + 1):
            times.append(1e3 * first_token_s(session, prefix() + random_tokens(rng, args.new_tokens, vocab)))
            cached.append(list(session.records.values())[-1].cached_tokens)
        return _Kind(statistics.median(times[1:]), (min(cached[1:]), max(cached[1:])))

    shared = random_tokens(rng, length, vocab)
    miss = several(lambda: random_tokens(rng, length, vocab))
    hit = several(lambda: shared)
    alone = several(list)
    engine.check_integrity()
    is_hit = hit.cached[0] > 0
    target = verdict(hit.ms - alone.ms < HIT_TARGET_MS, f"< {HIT_TARGET_MS:.0f} ms")
    print(
        f"time to first token of {length} shared and {args.new_tokens} new tokens, of {args.repeats}:\n"
        f"  miss {miss.ms:9.1f} ms, at most {miss.cached[1]} tokens from the cache\n"
        f"  hit  {hit.ms:9.1f} ms, at least {hit.cached[0]} tokens from the cache\n"
        f"  the new tokens alone {alone.ms:.1f} ms; beyond them a hit costs {hit.ms - alone.ms:.1f} ms "
        f"{target if is_hit else '(NO HIT: nothing came from the cache)'}",
        flush=True,
    )
    return {
        "kind": "prefix-hit",
        **environment(engine),
        "spec": str(engine.spec or "plain"),
        "shared_tokens": length,
        "new_tokens": args.new_tokens,
        "miss_ms": round(miss.ms, 3),
        "hit_ms": round(hit.ms, 3),
        "new_tokens_alone_ms": round(alone.ms, 3),
        "hit_cached_tokens": hit.cached[0],
        "failed": 0 if is_hit else args.repeats,
    }


SCENARIOS: dict[str, Callable[[Engine, argparse.Namespace], dict[str, Any]]] = {
    "long-prompt": long_prompt,
    "prefix-hit": prefix_hit,
}


def first_token_s(session: Session, prompt: list[int]) -> float:
    """Time to first token of a prompt on an idle engine."""
    request_id = session.add(Job(prompt, 1))
    session.drain()
    return session.records[request_id].first_token_s


def verdict(good: bool, target: str) -> str:
    """Whether a figure meets its target."""
    return f"({target}: {'ok' if good else 'MISSED'})"


def _check_fits(engine: Engine, args: argparse.Namespace, *names: str) -> None:
    """Raise `ConfigError` unless these flags' tokens and one behind them are no more than a request's."""
    if sum(getattr(args, name) for name in names) + 1 > engine.max_model_len:
        given = " and ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names)
        raise ConfigError(
            f"{given} and a token of the answer are above the {engine.max_model_len} tokens of a request; "
            f"ask for fewer, or raise --max-model-len"
        )


def _step(session: Session, streams: Sequence[Record]) -> None:
    session.step()
    if any(each.ended for each in streams):
        raise ConfigError("a stream ended before the long prompt was done; raise --stream-tokens")
