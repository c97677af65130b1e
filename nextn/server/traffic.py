"""The log line of traffic: what the engine did since the last one."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class TrafficLog:
    """One log line for each stretch of traffic, from differences of the engine's counters."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def __call__(self, stats: Mapping[str, float], seconds: float) -> None:
        """Log what happened since the last call, in `seconds` of work."""
        since = {name: value - self._before.get(name, 0) for name, value in stats.items()}
        parts = [
            f"running {stats['running']:.0f}",
            f"waiting {stats['waiting']:.0f}",
            f"{since['generated_tokens'] / max(seconds, 1e-9):.1f} tokens/s",
        ]
        if since["cycles"]:
            parts.append(f"acceptance length {since['emitted'] / since['cycles']:.2f}")
        if pages := stats["pages"]:
            used, kept = 100 * stats["pages_used"] / pages, 100 * stats["pages_cached"] / pages
            parts.append(f"cache {used:.0f} % used, {kept:.0f} % kept")
        if looked_up := since["cached_tokens"] + since["prompt_tokens"]:
            parts.append(f"hit rate {100 * since['cached_tokens'] / looked_up:.0f} %")
        logger.info("%s", ", ".join(parts))
        self._before = dict(stats)
