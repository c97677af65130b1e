"""A connection as uvicorn handles it, except that a client which leaves is noticed whatever it has sent."""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_AHEAD_BYTES = 65536
"""Most that a client may send behind a request that is being answered."""


class Connection(H11Protocol):
    """Goes on reading while an answer is made, as an end of file stands behind all that was sent before it.

    uvicorn stops at the first byte of a next request, and an answer nobody waits for would go on to its end.
    """

    def handle_events(self) -> None:
        super().handle_events()
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or not self.flow.read_paused:
            return
        if len(self.conn.trailing_data[0]) > MAX_AHEAD_BYTES:
            self.transport.close()
        else:
            self.flow.resume_reading()
