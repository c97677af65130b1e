"""Between asyncio and the engine: one thread owns the engine, every request ends in exactly one final output.

The event loop sends commands through a queue; the engine thread sleeps on it when there is nothing to do and
posts each step's outputs back to the loop, which alone knows who waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nextn.engine.grammar import CompiledGrammar
from nextn.engine.request import FinishReason, Output, Request, SamplingParams
from nextn.errors import NextnError
from nextn.server.metrics import Latency, Metrics
from nextn.text import Tokenizer

logger = logging.getLogger(__name__)

_LAST_STEP_SECONDS = 60.0
"""How long the server waits for a step in progress when it ends; a thread that hangs must not keep it."""


class EngineLike(Protocol):
    """What the server needs of an engine. Any thread may call `validate`, the engine's own all the rest."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with dummy weights: the engine then takes and gives token ids only."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""

    def validate(self, prompt_tokens: list[int], params: SamplingParams) -> CompiledGrammar | None:
        """Raise RequestError for a request that cannot be served; its grammar, compiled."""

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError and keeps nothing of it when it cannot run."""

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    def has_work(self) -> bool:
        """Whether `step` would do something."""

    def step(self) -> list[Output]:
        """Advance the open requests."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the start, and what is open now."""

    def close(self) -> None:
        """Give everything back."""


class Unavailable(NextnError):
    """The server takes no requests: it is ending, or its engine has failed."""


class Busy(NextnError):
    """As many requests are open as the server takes."""


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[Request]
    added: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(slots=True)
class _Open:
    """A request without its final output: who waits for it, and what is known of it."""

    ticket: Ticket
    latency: Latency
    last: Output | None = None


class Ticket:
    """The waiting side of one or several requests that were submitted together; used on the loop only."""

    def __init__(self, bridge: Bridge, request_ids: Sequence[str]) -> None:
        self._bridge = bridge
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._arrived: asyncio.Queue[Output] = asyncio.Queue()
        self._open = set(request_ids)

    def put(self, output: Output) -> None:
        """Hand over an output (the bridge does)."""
        self._arrived.put_nowait(output)

    async def next(self) -> tuple[int, Output]:
        """The next output and the place of its request among those submitted."""
        output = await self._arrived.get()
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
        return self._bridge.is_stopping

    def close(self) -> None:
        """Nobody waits any more: abort what has not ended."""
        self._bridge.abort(self._open)


class Bridge:
    """Runs one engine in a thread of its own on behalf of one event loop.

    max_open: requests that may be open at once. report: called by the engine thread every `report_every`
    seconds of traffic, with the engine's statistics and the seconds from the first step since the last report
    to the last one. on_failure: called on the loop when the engine has raised; every open request has got its
    error by then, and no other will be taken.
    """

    def __init__(
        self,
        engine: EngineLike,
        *,
        max_open: int,
        report: Callable[[Mapping[str, float], float], None] | None = None,
        report_every: float = 10.0,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = Metrics()
        self.metrics.engine_stats = lambda: self._stats
        self.max_open = max_open
        self.on_failure = on_failure
        self.failure: BaseException | None = None
        self._report = report
        self._report_every = report_every
        # When the first and the last step since the last report began and ended; the engine thread's own.
        self._traffic: tuple[float, float] | None = None
        self._stats: Mapping[str, float] = {}
        """The engine's statistics after its last step, for any thread; replaced, never changed."""
        self._open: dict[str, _Open] = {}
        self._adding: set[asyncio.Future[None]] = set()
        self._stopping = asyncio.Event()
        self._commands: deque[_Add | _Abort | _Stop] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Requests that the engine has taken and not ended; the engine thread's own.
        self._live: set[str] = set()

    # The loop's side.

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._loop is not None and not self._stopping.is_set() and self.failure is None

    @property
    def is_stopping(self) -> bool:
        """Whether the server was told to end."""
        return self._stopping.is_set() and self.failure is None

    @property
    def num_open(self) -> int:
        """Requests without their final output."""
        return len(self._open)

    def start(self) -> None:
        """Start the engine thread; outputs go to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> Ticket:
        """Give requests to the engine, all or none; raises Unavailable, Busy or the engine's RequestError."""
        self._check_available()
        if len(self._open) + len(requests) > self.max_open:
            raise Busy(
                f"{len(self._open)} requests are open and at most {self.max_open} are taken; try again"
            )
        ticket = Ticket(self, [request.request_id for request in requests])
        now = time.monotonic()
        self._open.update((request.request_id, _Open(ticket, Latency(now))) for request in requests)
        added = asyncio.get_running_loop().create_future()
        self._adding.add(added)
        self._command(_Add(requests, added))
        try:
            await added
        except BaseException:  # refused, or the task was cancelled: either way nobody will read the ticket
            ticket.close()
            raise
        finally:
            self._adding.discard(added)
        return ticket

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests early; those that have ended are left alone."""
        ended = [request_id for request_id in request_ids if request_id in self._open]
        self._end(ended, "abort", None)
        if ended:
            self._command(_Abort(ended))

    async def until_stopping(self) -> None:
        """Return when the server has been told to end."""
        await self._stopping.wait()

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more requests, give the open ones `grace` seconds, end the rest, and end the thread."""
        if self._stopping.is_set() or self._loop is None:
            return
        self._stopping.set()
        deadline = time.monotonic() + grace
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._fail_open(Unavailable("the server is shutting down"))
        self._command(_Stop())
        await asyncio.to_thread(self._thread.join, _LAST_STEP_SECONDS)

    def _check_available(self) -> None:
        if self.failure is not None:
            raise Unavailable("the engine has failed; the server is about to end")
        if not self.is_ready:
            raise Unavailable("the server is shutting down")

    def _command(self, command: _Add | _Abort | _Stop) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _dispatch(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            opened = self._open.get(output.request_id)
            if opened is None:  # aborted on this side before the engine knew
                continue
            if output.finish_reason is not None:
                del self._open[output.request_id]
            opened.last = output
            self.metrics.record(output, opened.latency, now)
            opened.ticket.put(output)

    def _end(self, request_ids: Iterable[str], reason: FinishReason, error: str | None) -> None:
        self._dispatch(
            [_final(request_id, self._open[request_id], reason, error) for request_id in request_ids]
        )

    def _fail_open(self, error: NextnError) -> None:
        """Give every open request its final output, and every one that is being added its refusal."""
        self._end(list(self._open), "error", str(error))
        for added in self._adding:
            if not added.done():
                added.set_exception(error)

    def _failed(self, error: BaseException) -> None:
        self.failure = error
        self._fail_open(Unavailable("the engine has failed; the server is about to end"))
        if self.on_failure is not None:
            self.on_failure()

    # The engine thread's side.

    def _run(self) -> None:
        try:
            self._stats = self.engine.stats()
            while self._obey():
                if self.engine.has_work():
                    self._step()
            self.engine.close()
        except BaseException as error:
            logger.critical("the engine failed; %d requests were open", len(self._live), exc_info=error)
            self._post(self._failed, error)

    def _step(self) -> None:
        started = time.monotonic()
        outputs = self.engine.step()
        self._live.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
        self._stats = self.engine.stats()
        self._post(self._dispatch, outputs)
        if self._live and not self.engine.has_work():
            lost = sorted(self._live)
            raise RuntimeError(f"the engine has no work left but has not ended {', '.join(lost)}")
        self._traffic = (self._traffic[0] if self._traffic else started, time.monotonic())
        self._report_if_due()

    def _report_if_due(self) -> None:
        if self._traffic is None or self._until_report() > 0:
            return
        first, last = self._traffic
        self._traffic = None
        if self._report is not None:
            self._report(self._stats, last - first)

    def _obey(self) -> bool:
        """Carry out the commands that have arrived; sleep while there is nothing to do. False means stop."""
        while True:
            with self._wake:
                while not self._commands and not self.engine.has_work():
                    self._wake.wait(None if self._traffic is None else self._until_report())
                    self._report_if_due()
                commands = [self._commands.popleft() for _ in range(len(self._commands))]
            for command in commands:
                match command:
                    case _Stop():
                        return False
                    case _Abort(request_ids):
                        self._abort(request_ids)
                    case _Add(requests, added):
                        self._add(requests, added)
            if self.engine.has_work():
                return True

    def _until_report(self) -> float:
        """Seconds until the traffic so far is to be reported."""
        assert self._traffic is not None
        return max(0.0, self._traffic[0] + self._report_every - time.monotonic())

    def _add(self, requests: Sequence[Request], added: asyncio.Future[None]) -> None:
        try:
            for request in requests:
                self.engine.add(request)
                self._live.add(request.request_id)
        except NextnError as error:
            self._post(_set_exception, added, error)  # whoever waits for it then aborts those taken
            return
        self._post(_set_done, added)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._live.discard(request_id)
            self.engine.abort(request_id)

    def _post(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed only when the server has ended; then nobody is left to tell.
            logger.debug("the event loop has closed before the engine thread ended")


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _final(request_id: str, opened: _Open, reason: FinishReason, error: str | None) -> Output:
    """The end of a request that is the server's doing, with the counts as of the last output."""
    last = opened.last or Output(request_id, "", (), 0, 0)
    # The engine may still count in its own acceptance, so this one is a copy.
    acceptance = replace(last.acceptance, by_length=dict(last.acceptance.by_length))
    return replace(
        last,
        text="",
        token_ids=(),
        logprobs=(),
        prompt_logprobs=None,
        finish_reason=reason,
        error=error,
        acceptance=acceptance,
    )
