"""Shows how far a long read or write has come: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType

logger = logging.getLogger(__name__)

_TERMINAL_INTERVAL = 0.2
_LOG_INTERVAL = 10.0
_BAR_WIDTH = 24


class Progress:
    """Counts bytes from any number of threads and reports GB and GB/s to stderr.

    label: what is being done ("loading DeepSeek-V3"). total: bytes expected. shown: False keeps it silent.
    As a context it closes itself; after an error it only ends its line, so that the error has one of its own.
    """

    def __init__(self, label: str, total: int, *, shown: bool = True) -> None:
        self._label = label
        self._total = total
        self._shown = shown
        self._terminal = sys.stderr is not None and sys.stderr.isatty()  # a daemon may have none
        self._done = 0
        self._start = time.monotonic()
        self._next = self._start + (0.0 if self._terminal else _LOG_INTERVAL)
        self._lock = threading.Lock()
        self._line_is_open = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._line_is_open:
            sys.stderr.write("\n")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def advance(self, nbytes: int) -> None:
        """Add `nbytes`; shows the new state when enough time has passed since the last report."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if self._shown and now >= self._next:
                self._next = now + (_TERMINAL_INTERVAL if self._terminal else _LOG_INTERVAL)
                self._show(end="")

    def close(self) -> None:
        """Report the final state."""
        with self._lock:
            if self._shown:
                self._show(end="\n")

    def _show(self, end: str) -> None:
        share = 100 * self._done / self._total if self._total else 100.0
        rate = self._done / max(self.seconds, 1e-9) / 1e9
        amount = f"{format_bytes(self._done)} of {format_bytes(self._total)}"
        text = f"{amount} ({share:.0f} %), {rate:.2f} GB/s"
        if self._terminal:
            bar = "#" * int(share * _BAR_WIDTH / 100)
            sys.stderr.write(f"\r{self._label} [{bar:{_BAR_WIDTH}}] {text}\x1b[K{end}")
            sys.stderr.flush()
            self._line_is_open = not end
        else:
            logger.info("%s: %s", self._label, text)


def format_bytes(nbytes: int) -> str:
    """Decimal MB below 1 GB, else GB, with two places."""
    return f"{nbytes / 1e6:.2f} MB" if nbytes < 10**9 else f"{nbytes / 1e9:.2f} GB"
