"""The log lines of traffic: what the engine did since the last one, and what the server refused."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

logger = logging.getLogger(__name__)

REFUSALS_EVERY = 10.0
"""Seconds that one line about refused requests stands for: clients may send thousands."""


class TrafficLog:
    """One log line for each stretch of traffic, from differences of counters."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def __call__(self, stats: Mapping[str, float], seconds: float) -> None:
        """Log what happened since the last call, in `seconds` of work.

        stats: the engine's, and `turned_away`, the answers with status 429.
        """
        since = {name: value - self._before.get(name, 0) for name, value in stats.items()}
        seconds = max(seconds, 1e-9)
        parts = [
            f"running {stats['running']:.0f}",
            f"waiting {stats['waiting']:.0f}",
            f"{since['generated_tokens'] / seconds:.1f} tokens/s",
            f"prefill {since['prompt_tokens'] / seconds:.0f} tokens/s",
        ]
        if since["cycles"]:
            parts.append(f"acceptance length {since['emitted'] / since['cycles']:.2f}")
        if pages := stats["pages"]:
            used, kept = 100 * stats["pages_used"] / pages, 100 * stats["pages_cached"] / pages
            parts.append(f"cache {used:.0f} % used, {kept:.0f} % kept")
        if since["queried_tokens"]:
            parts.append(f"hit rate {100 * since['cached_tokens'] / since['queried_tokens']:.0f} %")
        parts += [
            f"{name} {since[key]:.0f}"
            for key, name in (("preemptions", "preempted"), ("turned_away", "turned away"))
            if since[key]
        ]
        logger.info("%s", ", ".join(parts))
        self._before = dict(stats)


class RefusalLog:
    """One log line for all requests that were refused within a while; used on the event loop only."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._due: asyncio.TimerHandle | None = None

    def record(self, path: str, status: int) -> None:
        """A request to a route was answered with a status of 400 and more."""
        self._seen[f"{status} {path}"] += 1
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(REFUSALS_EVERY, self.flush)

    def flush(self) -> None:
        """Log what there is."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
            counts = ", ".join(f"{count} x {what}" for what, count in self._seen.most_common())
            logger.info("refused: %s", counts)
            self._seen.clear()
