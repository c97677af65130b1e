"""When a client that was turned away may try again, from how fast requests have been ending."""

from __future__ import annotations

import math
from collections import deque

WINDOW_SECONDS = 60.0
"""How far back endings count; also the longest that a client is asked to wait."""


class EndRate:
    """When requests ended of late, since the server was last idle. The time comes from outside."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=1024)
        self._busy_since = 0.0

    def begin(self, now: float) -> None:
        """The server is idle no longer."""
        self._ends.clear()
        self._busy_since = now

    def record(self, now: float) -> None:
        """A request has ended and left its place."""
        self._ends.append(now)

    def seconds_until(self, places: int, now: float) -> int:
        """About how long it takes until so many places are free: 1 to 60 whole seconds.

        While none has ended, the first may be about to: the rate is then one in the time so far.
        """
        recent = [end for end in self._ends if now - end <= WINDOW_SECONDS]
        # With the buffer full its oldest entry, not the window, is where the count begins.
        oldest = recent[0] if len(recent) == self._ends.maxlen else self._busy_since
        span = min(WINDOW_SECONDS, now - oldest)
        seconds = places * span / max(1, len(recent))
        return math.ceil(min(WINDOW_SECONDS, max(1.0, seconds)))
