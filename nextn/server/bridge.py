"""Between asyncio and the engine: one thread owns the engine, every request ends in exactly one final output.

The event loop sends commands through a queue; the engine thread sleeps on it when there is nothing to do and
posts each step's outputs back to the loop, which alone knows who waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from nextn.engine.grammar import Grammars
from nextn.engine.request import FinishReason, Output, Request, SamplingParams
from nextn.engine.stats import StepReport
from nextn.errors import NextnError
from nextn.server.metrics import ErrorCause, Latency, Metrics
from nextn.server.overload import EndRate
from nextn.server.places import Places
from nextn.server.ticket import Ticket
from nextn.text import Tokenizer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

State = Literal["loading", "ok", "stopping", "engine failed"]

_LAST_STEP_SECONDS = 3.0
"""How long the server waits for a step in progress when it ends, and when it is told to hurry."""
_HURRIED_STEP_SECONDS = 0.5

_REFUSALS: dict[State, str] = {
    "loading": "the model is still loading",
    "stopping": "the server is shutting down",
    "engine failed": "the engine has failed; the server is about to end",
}


class EngineLike(Protocol):
    """What the server needs of an engine. Any thread may use `check` and `grammars`, its own all the rest.

    on_step: called with each step that has landed. on_start: called with the id of each request when its
    first step is launched, and not again if it is preempted later.
    """

    on_step: Callable[[StepReport], None]
    on_start: Callable[[str], None]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with dummy weights: the engine then takes and gives token ids only."""

    @property
    def grammars(self) -> Grammars | None:
        """Compiles what texts must match; None where there is no tokenizer."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""

    def check(self, prompt_tokens: list[int], params: SamplingParams) -> None:
        """Raise RequestError for a request that cannot be served, whatever its grammar turns out to be."""

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

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages and open requests add up."""

    def close(self) -> None:
        """Give everything back."""


class Unavailable(NextnError):
    """The server takes no requests: it is ending, or its engine has failed."""


class Busy(NextnError):
    """As many requests are open as the server takes; `retry_after` seconds later there may be room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Damaged(NextnError):
    """The engine's pages and requests do not add up."""


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[Request]
    asked: float
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Check:
    done: asyncio.Future[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Check | _Abort | _Stop


@dataclass(slots=True)
class _Open:
    """A request without its final output: who waits for it, and what is known of it."""

    ticket: Ticket
    latency: Latency
    last: Output | None = None
    is_overrun: bool = False
    """Whether too much of it is unread for it to go on."""


class Bridge:
    """Runs one engine in a thread of its own on behalf of one event loop.

    engine: None where `load` builds it, on the engine's thread, while the loop already answers.
    max_open: requests that may be open at once. report: called by the engine thread every `report_every`
    seconds of traffic, and when the thread ends, with the statistics (see `TrafficLog`) and the seconds from
    the first step since the last report to the last one. on_ready: called on the loop when requests are
    taken. on_failure: called on the loop when the engine has raised, or when `fail` was called; every open
    request has got its error by then, and no other will be taken.
    """

    def __init__(
        self,
        engine: EngineLike | None,
        *,
        max_open: int,
        load: Callable[[], EngineLike] | None = None,
        report: Callable[[Mapping[str, float], float], None] | None = None,
        report_every: float = 10.0,
        on_ready: Callable[[], None] | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self.metrics = Metrics()
        self._watch()
        self.max_open = max_open
        self.on_ready = on_ready
        self.on_failure = on_failure
        self.failure: BaseException | None = None
        self.turn: int | None = None
        """Which turn of its work the engine thread is at; None while it sleeps or loads. For any thread."""
        self._engine = engine
        self._load = load
        self._report = report
        self._report_every = report_every
        # When the first and the last step since the last report began and ended; the engine thread's own.
        self._traffic: tuple[float, float] | None = None
        self._stats: Mapping[str, float] = {}
        """The engine's statistics after its last step, for any thread; replaced, never changed."""
        self._open: dict[str, _Open] = {}
        self.places = Places(self.check_room)
        """Kept for requests that are being read; they count like open ones."""
        self._ends = EndRate()
        # What the engine thread has been asked for and has not answered.
        self._asked: set[asyncio.Future[Any]] = set()
        self._stopping = asyncio.Event()
        self._is_hurried = False
        self._is_ended = False
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = itertools.count()
        # Requests that the engine has taken and not ended, and when they came; the engine thread's own.
        self._live: dict[str, float] = {}

    def _watch(self) -> None:
        """What /metrics shows of the state here."""
        metrics = self.metrics
        metrics.engine_stats = lambda: self._stats
        metrics.watch("nextn_ready", "Whether requests are taken, 0 or 1.", lambda: self.state == "ok")
        metrics.watch(
            "nextn_requests_open", "Requests without their end, queued ones too.", lambda: self.num_open
        )
        metrics.watch(
            "nextn_requests_reading",
            "Places kept for requests being read or tokenized.",
            lambda: self.places.reserved,
        )
        metrics.watch(
            "nextn_requests_open_limit",
            "At so many, open and being read, more get 429.",
            lambda: self.max_open,
        )

    # The loop's side.

    @property
    def engine(self) -> EngineLike:
        """The engine; raises Unavailable while it is loading."""
        if self._engine is None:
            raise Unavailable(_REFUSALS["loading"])
        return self._engine

    @property
    def state(self) -> State:
        """What the server is doing; 'ok' alone means that requests are taken."""
        if self.failure is not None:
            return "engine failed"
        if self._stopping.is_set():
            return "stopping"
        return "loading" if self._loop is None or self._engine is None else "ok"

    @property
    def is_loaded(self) -> bool:
        """Whether there has been an engine at all."""
        return self._engine is not None

    @property
    def is_stopping(self) -> bool:
        """Whether the server was told to end."""
        return self.state == "stopping"

    @property
    def is_ended(self) -> bool:
        """Whether `stop` is through: every request has had its end."""
        return self._is_ended and not self._open

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread lives; after `stop` it then hangs in a step, or loads."""
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests without their final output."""
        return len(self._open)

    def start(self) -> None:
        """Start the engine thread; outputs go to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_room(self, count: int) -> None:
        """Raise Unavailable or Busy unless so many requests would be taken now; slow senders give way."""
        if self.state != "ok":
            raise Unavailable(_REFUSALS[self.state])
        self.places.make_room(self._missing(count))
        if (missing := self._missing(count)) > 0:
            taken = len(self._open) + self.places.reserved
            message = f"{taken} requests are open and at most {self.max_open} are taken; try again"
            raise Busy(message, self._ends.seconds_until(missing, time.monotonic()))

    def _missing(self, count: int) -> int:
        """How many of so many more requests would find no place; below 0 if there are more places."""
        return len(self._open) + self.places.reserved + count - self.max_open

    async def submit(self, requests: Sequence[Request]) -> Ticket:
        """Give requests to the engine, all or none; raises Unavailable, Busy or the engine's RequestError."""
        self.check_room(len(requests))
        ticket = Ticket(self, [request.request_id for request in requests])
        now = time.monotonic()
        if not self._open:
            self._ends.begin(now)
        self._open.update((request.request_id, _Open(ticket, Latency(now))) for request in requests)
        try:
            await self._ask(lambda done: _Add(requests, now, done))
        except BaseException:  # refused, or the task was cancelled: either way nobody will read the ticket
            self._forget([request.request_id for request in requests])
            raise
        return ticket

    async def check_integrity(self) -> Mapping[str, float]:
        """The engine's statistics, if its own check between two steps finds nothing; else raises Damaged.

        Raises Unavailable where there is no engine to ask.
        """
        if self.state != "ok":
            raise Unavailable(_REFUSALS[self.state])
        return await self._ask(_Check)

    def abort(self, request_ids: Iterable[str], error: str | None = None) -> None:
        """End requests early; those that have ended are left alone."""
        ended = [request_id for request_id in request_ids if request_id in self._open]
        self._end(ended, "abort", error)
        if ended:
            self._command(_Abort(ended))

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Drop requests that nobody has been given: they count nowhere, as their end says nothing."""
        for request_id in request_ids:
            self._open.pop(request_id, None)
        self._command(_Abort(request_ids))

    async def until_stopping(self) -> None:
        """Return when the server has been told to end."""
        await self._stopping.wait()

    def refuse(self) -> None:
        """Take no more requests from now on; those that are open go on."""
        self._stopping.set()

    def hurry(self) -> None:
        """Let `stop` wait for nothing any more; from any thread, before or during it."""
        self._is_hurried = True

    def fail(self, error: BaseException) -> None:
        """Take the engine for lost though its thread has not ended; from any thread."""
        self._post(self._failed, error)

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more requests, give the open ones `grace` seconds, end the rest, and end the thread.

        A thread that hangs in a step or is still loading is left to itself (see `is_running`).
        """
        if self._is_ended or self._loop is None:
            return
        self.refuse()
        self._is_ended = True
        await self._until(lambda: not self._open, grace, hurried=0.0)
        self._fail_open(Unavailable(_REFUSALS["stopping"]))
        self._command(_Stop())
        if self._engine is not None and self.failure is None:
            await self._until(lambda: not self.is_running, _LAST_STEP_SECONDS, hurried=_HURRIED_STEP_SECONDS)

    async def _until(self, condition: Callable[[], bool], seconds: float, *, hurried: float) -> None:
        """Wait for the condition, that long at most, and only `hurried` seconds after `hurry`."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started >= (min(seconds, hurried) if self._is_hurried else seconds):
                return
            await asyncio.sleep(0.01)

    async def _ask(self, command: Callable[[asyncio.Future[_T]], _Command]) -> _T:
        """Send a command and wait for what the engine thread answers."""
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._asked.add(done)
        self._command(command(done))
        try:
            return await done
        finally:
            self._asked.discard(done)

    def _command(self, command: _Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _dispatch(self, outputs: Sequence[Output]) -> None:
        """Hand outputs to whoever waits for them; an error in that is the bridge's failure.

        Otherwise what had not been handed out would be lost, ends among it.
        """
        try:
            self._count(self._hand_out(outputs))
        except Exception as error:
            logger.critical("outputs could not be handed out", exc_info=error)
            self._failed(error)

    def _hand_out(self, outputs: Sequence[Output]) -> list[tuple[Output, _Open]]:
        """Put outputs where they are read; first of all, so that no error in the rest takes an end away."""
        handed = []
        for output in outputs:
            opened = self._open.get(output.request_id)
            if opened is None:  # aborted on this side before the engine knew
                continue
            opened.last = output
            opened.is_overrun = not opened.ticket.put(output)
            if output.finish_reason is not None:
                del self._open[output.request_id]
            handed.append((output, opened))
        return handed

    def _count(self, handed: Sequence[tuple[Output, _Open]]) -> None:
        """Count what was handed out, and give up answers of which too much is unread."""
        now = time.monotonic()
        cause: ErrorCause = "shutdown" if self.is_stopping else "engine"
        overrun: dict[Ticket, str] = {}
        for output, opened in handed:
            if output.finish_reason is not None:
                self._ends.record(now)
            if opened.is_overrun:
                overrun[opened.ticket] = output.request_id
            self.metrics.record(output, opened.latency, now, cause)
        for ticket, request_id in overrun.items():
            logger.warning("request %s: its client does not read the answer; it is given up", request_id)
            self.metrics.slow_reader()
            self.abort(ticket.overrun(), "the client did not read its answer fast enough")

    def _end(self, request_ids: Iterable[str], reason: FinishReason, error: str | None) -> None:
        self._dispatch(
            [_final(request_id, self._open[request_id], reason, error) for request_id in request_ids]
        )

    def _fail_open(self, error: NextnError) -> None:
        """Give every open request its final output, and everything asked for its refusal."""
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(error)
        self._end(list(self._open), "error", str(error))

    def _ready(self) -> None:
        if self.on_ready is not None and self.state == "ok":
            self.on_ready()

    def _failed(self, error: BaseException) -> None:
        if self.failure is not None:  # a step that was given up has raised in the end
            return
        if self._engine is None and self._stopping.is_set():  # a load that the end has broken off
            return
        self.failure = error
        self._fail_open(Unavailable(_REFUSALS["engine failed"]))
        if self.on_failure is not None:
            self.on_failure()

    # The engine thread's side.

    def _run(self) -> None:
        try:
            if self._engine is None:
                assert self._load is not None, "a bridge needs an engine, or what loads one"
                self._engine = self._load()
            self._connect(self._engine)
            self._post(self._ready)
            while self._obey() and self.failure is None:
                if self.engine.has_work():
                    self._step()
            self._report_traffic()
            self.engine.close()
        except BaseException as error:
            self._log_failure(error)
            self._post(self._failed, error)

    def _connect(self, engine: EngineLike) -> None:
        """Have the engine tell what it does."""
        self._stats = engine.stats()
        engine.on_step = self.metrics.stepped
        engine.on_start = self._started
        self.metrics.grammars = engine.grammars
        if engine.grammars is not None:
            engine.grammars.on_compiled = self.metrics.compiled

    def _started(self, request_id: str) -> None:
        if request_id in self._live:
            self.metrics.started(time.monotonic() - self._live[request_id])

    def _log_failure(self, error: BaseException) -> None:
        """Log a traceback, but none for what was said on purpose or what an end while loading broke off."""
        if self._engine is not None:
            logger.critical("the engine failed; %d requests were open", len(self._live), exc_info=error)
        elif not isinstance(error, NextnError) and not self._stopping.is_set():
            logger.critical("the model could not be loaded", exc_info=error)

    def _step(self) -> None:
        started = time.monotonic()
        outputs = self.engine.step()
        for output in outputs:
            if output.finish_reason is not None:
                self._live.pop(output.request_id, None)
        self._stats = self.engine.stats()
        self._post(self._dispatch, outputs)
        if self._live and not self.engine.has_work():
            lost = sorted(self._live)
            raise RuntimeError(f"the engine has no work left but has not ended {', '.join(lost)}")
        self._traffic = (self._traffic[0] if self._traffic else started, time.monotonic())
        if self._is_report_due():
            self._report_traffic()

    def _is_report_due(self) -> bool:
        return self._traffic is not None and self._until_report() <= 0

    def _report_traffic(self) -> None:
        """Report what there was since the last time, if anything."""
        if self._traffic is None:
            return
        first, last = self._traffic
        self._traffic = None
        if self._report is not None:
            self._report({**self._stats, "turned_away": self.metrics.turned_away}, last - first)

    def _await_commands(self) -> list[_Command]:
        """The commands that have arrived; sleeps while there is nothing to do."""
        with self._wake:
            while not (self._commands or self.engine.has_work() or self._is_report_due()):
                self.turn = None
                self._wake.wait(None if self._traffic is None else self._until_report())
            return [self._commands.popleft() for _ in range(len(self._commands))]

    def _obey(self) -> bool:
        """Carry out the commands that have arrived until there is work. False means stop."""
        while True:
            commands = self._await_commands()
            self.turn = next(self._turns)
            if self._is_report_due():  # without the lock and in a turn, as whoever reads the log may block it
                self._report_traffic()
            checked: list[asyncio.Future[Mapping[str, float]]] = []
            for command in commands:
                match command:
                    case _Stop():
                        return False
                    case _Abort(request_ids):
                        self._abort(request_ids)
                    case _Add(requests, asked, done):
                        self._add(requests, asked, done)
                    case _Check(done):
                        checked.append(done)
            if checked:
                self._check(checked)
            if self.engine.has_work():
                return True

    def _until_report(self) -> float:
        """Seconds until the traffic so far is to be reported."""
        assert self._traffic is not None
        return max(0.0, self._traffic[0] + self._report_every - time.monotonic())

    def _add(self, requests: Sequence[Request], asked: float, done: asyncio.Future[None]) -> None:
        try:
            for request in requests:
                self.engine.add(request)
                self._live[request.request_id] = asked
        except NextnError as error:
            self._post(_set_exception, done, error)  # whoever waits for it then aborts those taken
            return
        self._post(_set_result, done, None)

    def _check(self, asked: Sequence[asyncio.Future[Mapping[str, float]]]) -> None:
        """One check for all that have asked since the last one: it takes its time, and steps wait for it."""
        try:
            self.engine.check_integrity()
        except Exception as error:  # whatever a damaged state makes the check raise, it is what was asked for
            logger.critical("the engine's integrity check failed", exc_info=error)
            self._post(_set_exceptions, asked, f"{type(error).__name__}: {error}")
            return
        self._post(_set_results, asked, self.engine.stats())

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._live.pop(request_id, None)
            self.engine.abort(request_id)

    def _post(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed only when the server has ended; then nobody is left to tell.
            logger.debug("the event loop has closed before the engine thread ended")


def _set_result(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _set_results(futures: Iterable[asyncio.Future[_T]], result: _T) -> None:
    for future in futures:
        _set_result(future, result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _set_exceptions(futures: Iterable[asyncio.Future[Any]], damage: str) -> None:
    for future in futures:
        _set_exception(future, Damaged(damage))


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
