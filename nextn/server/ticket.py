"""The waiting side of requests that were submitted together, with a bound on what nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from nextn.engine.request import Output

MAX_UNREAD_BYTES = 4 * 2**20
"""Most that one request's outputs may take while its client does not read, by the rough count of `_size`.

Plain text fills it after some 8,000 outputs. What the connection itself holds comes on top: the sockets of
both machines, some megabytes, and 64 KiB of this process.
"""


class Desk(Protocol):
    """Where a ticket's requests are known: the bridge."""

    @property
    def is_stopping(self) -> bool:
        """Whether the server was told to end."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests early; those that have ended are left alone."""


class Ticket:
    """Outputs of one or several requests in the order of their arrival; used on the loop only."""

    def __init__(self, desk: Desk, request_ids: Sequence[str]) -> None:
        self._desk = desk
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._arrived: asyncio.Queue[tuple[Output, int]] = asyncio.Queue()
        self._unread = 0
        self._open = set(request_ids)
        self.is_overrun = False
        """Whether outputs were dropped because nobody read them."""

    def put(self, output: Output) -> bool:
        """Hand over an output (the bridge does); False if too much is unread for the request to go on."""
        size = _size(output)
        self._unread += size
        self._arrived.put_nowait((output, size))
        return output.finish_reason is not None or self._unread <= MAX_UNREAD_BYTES * len(self._index)

    def overrun(self) -> list[str]:
        """Drop what is unread; the requests that may still be open, which are now to be ended."""
        self.is_overrun = True
        self._unread = 0
        while not self._arrived.empty():
            self._arrived.get_nowait()
        return list(self._open)

    async def next(self) -> tuple[int, Output]:
        """The next output and the place of its request among those submitted."""
        output, size = await self._arrived.get()
        self._unread -= size
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        return self._index[output.request_id], output

    @property
    def is_open(self) -> bool:
        """Whether a final output is still to be read."""
        return bool(self._open)

    @property
    def is_stopping(self) -> bool:
        """Whether the server is ending, so that an error is not the engine's."""
        return self._desk.is_stopping

    def close(self) -> None:
        """Nobody waits any more: abort what has not ended."""
        self._desk.abort(self._open)


def _size(output: Output) -> int:
    """About how many bytes an output holds; a prompt's log-probabilities have a limit of their own."""
    size = 450 + 2 * len(output.text) + 8 * len(output.token_ids)
    for entry in output.logprobs:
        size += 150 + 100 * len(entry.top)
    return size
