"""Places that requests keep while they are read; who sends slowly gives way where others find none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_SECONDS = 2.0
"""So long a body may take though others wait for its place; 8 MiB at 34 Mbit/s."""


class Place:
    """What one request keeps until it is known what it asks for. lost: set when others were given it."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.held = 0
        self.lost = asyncio.Event()

    def keep(self, count: int) -> None:
        """Keep so many places from now on; raises what `check` of `Places` does, and then keeps none."""
        self._places.release(self)
        self._places.check(count)
        self._places.reserved += count
        self.held = count

    def has_body(self) -> None:
        """The request is read: nobody takes its place away any more."""
        self._places.reading.pop(self, None)


class Places:
    """All places that are kept. check: raises if so many more are not to be had; it may call `make_room`.

    reserved: how many are kept. reading: requests whose bodies are on their way, the oldest first, and since
    when.
    """

    def __init__(self, check: Callable[[int], None]) -> None:
        self.check = check
        self.reserved = 0
        self.reading: dict[Place, float] = {}

    @contextmanager
    def reserve(self) -> Iterator[Place]:
        """One place for a request that is still to be read; what is kept of it is given back at the end."""
        place = Place(self)
        place.keep(1)
        self.reading[place] = time.monotonic()
        try:
            yield place
        finally:
            place.has_body()
            self.release(place)

    def release(self, place: Place) -> None:
        """Give back what a request keeps."""
        self.reserved -= place.held
        place.held = 0

    def make_room(self, count: int) -> None:
        """Take so many places from those whose bodies are on their way for the longest, or none at all."""
        now = time.monotonic()
        slow = [place for place, since in self.reading.items() if now - since > GRACE_SECONDS]
        if len(slow) < count:
            return
        for place in slow[: max(0, count)]:
            place.has_body()
            self.release(place)
            place.lost.set()
