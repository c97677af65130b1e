"""Ends the process where nobody else can: a step that hangs, an end that takes too long.

A thread of its own looks a few times a second. Where it cannot look, because a hanging call keeps the
interpreter's lock, faulthandler's timer, which needs no lock, ends the process in its place.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from nextn.errors import NextnError
from nextn.server.bridge import Bridge

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""How long answers and threads may take to end after everything that has a limit of its own."""

_TICK = 0.25

_WORDS_SECONDS = 1.0
"""How long the log may take to be written at the end: whoever reads it may have stopped."""


class StepTimeout(NextnError):
    """A step of the engine takes longer than any should."""


class Watchdog:
    """Looks after one bridge, and after the end of the process.

    step_timeout: seconds that a turn of the engine's thread may take, 0 for any; then the bridge fails with
    StepTimeout. end_by: gives the time (of `time.monotonic`) at which the process must have ended, None for
    never; it is then ended with status 0 if every request has had its end, else with 1.
    """

    def __init__(self, bridge: Bridge, step_timeout: float, end_by: Callable[[], float | None]) -> None:
        self._bridge = bridge
        self._step_timeout = step_timeout
        self._end_by = end_by
        # The number, as a file would be flushed, for which it has a lock.
        self._stderr = None if sys.__stderr__ is None else sys.__stderr__.fileno()
        self._turn: int | None = None
        self._lost_by: float | None = None
        self._seen = 0.0
        """How long this thread has seen the same turn: a process that was stopped and goes on is no hang."""

    def start(self) -> None:
        """Look from now on until the process ends."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._set_last_resort()
            time.sleep(_TICK)
            self._check_end()
            self._check_step()

    def _set_last_resort(self) -> None:
        if self._step_timeout and self._stderr is not None:
            faulthandler.dump_traceback_later(self._step_timeout + END_SECONDS, exit=True, file=self._stderr)

    def _check_end(self) -> None:
        ends = [end for end in (self._end_by(), self._lost_by) if end is not None]
        if not ends or time.monotonic() < min(ends):
            return
        if self._bridge.is_ended and self._bridge.failure is None:
            peaceful = "a thread did not end with the server; the process ends without it"
            leave(0, lambda: logger.warning(peaceful))
        forced = "the server did not end in time; what its threads were doing:\n%s"
        leave(1, lambda: logger.critical(forced, stacks()))

    def _check_step(self) -> None:
        turn = self._bridge.turn
        if turn != self._turn:
            self._turn, self._seen = turn, 0.0
        elif turn is not None and self._bridge.failure is None:
            self._seen += _TICK
        if self._step_timeout and self._seen >= self._step_timeout:
            self._seen = float("-inf")  # said once
            self._lost_by = time.monotonic() + END_SECONDS  # even if the loop hangs as well
            message = f"a step has taken more than --step-timeout {self._step_timeout:g} s"
            _within(lambda: logger.critical("%s; what the threads are doing:\n%s", message, stacks()))
            self._bridge.fail(StepTimeout(message))


def stacks() -> str:
    """Every thread's stack, as a traceback shows it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


def leave(status: int, say: Callable[[], None] | None = None) -> NoReturn:
    """End the process at once, whatever its threads do; `say` logs why, and the log is written.

    Only a moment is left to that: a log that nobody reads takes no more when its pipe is full, and keeps its
    locks.
    """

    def words() -> None:
        if say is not None:
            say()
        logging.shutdown()

    _within(words)
    os._exit(status)


def _within(job: Callable[[], None]) -> None:
    """Do it on a thread of its own, and go on without it if it takes too long."""
    thread = threading.Thread(target=job, name="last words", daemon=True)
    thread.start()
    thread.join(_WORDS_SECONDS)
