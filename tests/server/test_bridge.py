"""The bridge alone, on an event loop of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.engine.request import Output, Request, SamplingParams
from nextn.errors import ConfigError, RequestError
from nextn.server.bridge import Bridge, Busy, Damaged, Ticket, Unavailable
from tests.server.conftest import ANSWER
from tests.server.fake import FakeEngine


def _with_bridge(
    engine: FakeEngine, test: Callable[[Bridge], Coroutine[Any, Any, None]], **options: Any
) -> Bridge:
    bridge = Bridge(engine, max_open=4, **options)

    async def run() -> None:
        bridge.start()
        try:
            await test(bridge)
        finally:
            await bridge.stop()

    asyncio.run(run())
    return bridge


def _request(name: str, max_tokens: int = 100) -> Request:
    return Request(name, [5, 6, 7], SamplingParams(max_tokens=max_tokens))


async def _read(ticket: Ticket) -> list[tuple[int, Output]]:
    outputs = []
    while ticket.is_open:
        outputs.append(await asyncio.wait_for(ticket.next(), 10))
    return outputs


def test_each_request_ends_once_and_last(engine: FakeEngine) -> None:
    async def test(bridge: Bridge) -> None:
        outputs = await _read(await bridge.submit([_request("a"), _request("b", 5)]))
        for index, reason in ((0, "stop"), (1, "length")):
            own = [output for place, output in outputs if place == index]
            assert [output.finish_reason for output in own] == [None] * (len(own) - 1) + [reason]
        assert "".join(output.text for place, output in outputs if place == 0) == ANSWER
        assert bridge.num_open == 0

    _with_bridge(engine, test)


def test_what_the_engine_refuses_is_raised_and_nothing_stays(engine: FakeEngine) -> None:
    async def test(bridge: Bridge) -> None:
        with pytest.raises(RequestError, match="empty"):
            await bridge.submit([_request("a"), Request("b", [], SamplingParams())])
        assert bridge.num_open == 0
        assert (await _read(await bridge.submit([_request("c")])))[-1][1].finish_reason == "stop"
        assert engine.aborted == ["a"]

    _with_bridge(engine, test)


def test_closing_a_ticket_aborts_what_is_open_and_only_that(engine: FakeEngine) -> None:
    engine.step_seconds = 0.005
    engine.script = lambda request: [40] * (2 if request.request_id == "short" else 10_000)

    async def test(bridge: Bridge) -> None:
        ticket = await bridge.submit([_request("short"), _request("long", 200)])
        while (await ticket.next())[1].finish_reason is None:
            pass
        ticket.close()
        ticket.close()
        (_, last) = (await _read(ticket))[-1]
        assert last.finish_reason == "abort"

    _with_bridge(engine, test)
    assert engine.aborted == ["long"]


def test_a_cancelled_submit_leaves_nothing_open(engine: FakeEngine) -> None:
    engine.step_seconds = 0.05

    async def test(bridge: Bridge) -> None:
        await bridge.submit([_request("a")])
        task = asyncio.create_task(bridge.submit([_request("b")]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bridge.num_open == 1

    _with_bridge(engine, test)
    assert engine.closed


def test_more_than_max_open_is_busy(engine: FakeEngine) -> None:
    async def test(bridge: Bridge) -> None:
        with pytest.raises(Busy, match="at most 4"):
            await bridge.submit([_request(str(i)) for i in range(5)])
        assert engine.seen == []

    _with_bridge(engine, test)


def test_nothing_is_taken_before_the_start_or_after_the_stop(engine: FakeEngine) -> None:
    async def nothing(_: Bridge) -> None:
        return

    bridge = Bridge(engine, max_open=4)
    with pytest.raises(Unavailable):
        asyncio.run(bridge.submit([_request("a")]))
    stopped = _with_bridge(engine, nothing)
    with pytest.raises(Unavailable, match="shutting down"):
        asyncio.run(stopped.submit([_request("a")]))
    assert engine.closed


def test_a_request_on_its_way_to_a_failing_engine_is_told(engine: FakeEngine) -> None:
    """It arrives during the step that raises: neither taken nor refused, it must still hear of the end."""
    stepping, release = threading.Event(), threading.Event()

    def fail() -> list[Output]:
        stepping.set()
        release.wait(10)
        raise RuntimeError("the device is on fire")

    engine.step = fail  # type: ignore[method-assign]

    async def test(bridge: Bridge) -> None:
        first = await bridge.submit([_request("a")])
        await asyncio.to_thread(stepping.wait, 10)
        second = asyncio.create_task(bridge.submit([_request("b")]))
        await asyncio.sleep(0.01)
        release.set()
        with pytest.raises(Unavailable, match="engine has failed"):
            await asyncio.wait_for(second, 10)
        assert [output.finish_reason for _, output in await _read(first)] == ["error"]
        assert bridge.num_open == 0
        with pytest.raises(Unavailable, match="engine has failed"):
            await bridge.submit([_request("c")])

    bridge = _with_bridge(engine, test)
    assert isinstance(bridge.failure, RuntimeError)


@pytest.mark.parametrize("damage", ["", "page 3 is free and held"])
def test_one_check_answers_all_that_wait_for_it(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Steps wait for it: a thousand checks in one turn would hold up every answer."""
    stepping, release = threading.Event(), threading.Event()
    step, check, checks = engine.step, engine.check_integrity, list[None]()

    def slow() -> list[Output]:
        stepping.set()
        release.wait(10)
        return step()

    engine.step, engine.damage = slow, damage  # type: ignore[method-assign]
    engine.check_integrity = lambda: checks.append(None) or check()  # type: ignore[method-assign,func-returns-value]

    async def test(bridge: Bridge) -> None:
        ticket = await bridge.submit([_request("a")])
        await asyncio.to_thread(stepping.wait, 10)
        asked = [asyncio.create_task(bridge.check_integrity()) for _ in range(500)]
        await asyncio.sleep(0)
        asked[7].cancel()  # a client that leaves takes no other's answer away
        release.set()
        await _read(ticket)
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        del answers[7]
        assert len(checks) == 1
        assert {isinstance(answer, Damaged) for answer in answers} == {bool(damage)}
        await asyncio.gather(bridge.check_integrity(), return_exceptions=True)
        assert len(checks) == 2

    with caplog.at_level(logging.CRITICAL):
        _with_bridge(engine, test)
    assert len(caplog.records) == (2 if damage else 0)


@pytest.mark.parametrize("times", [1, 10**9])
@pytest.mark.parametrize("at", ["first output", "end"])
def test_an_error_while_outputs_are_handed_out_is_the_bridge_s_failure(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, at: str, times: int
) -> None:
    """Each request still gets exactly one end: the engine's if it was there, else the error."""
    engine.script = lambda request: [40] * (200 if request.request_id == "short" else 10_000)
    engine.step_seconds, engine.max_model_len = 0.005, 10**5
    told: list[bool] = []

    async def test(bridge: Bridge) -> None:
        names = ("one", "short", "two")
        tickets = [await bridge.submit([_request(name, 9000)]) for name in names]
        record, left = bridge.metrics.record, times

        def fails(output: Output, *others: Any) -> None:
            nonlocal left
            if left and (at == "first output" or output.finish_reason is not None):
                left -= 1
                raise ZeroDivisionError("a defect")
            record(output, *others)

        bridge.metrics.record = fails  # type: ignore[method-assign]
        bridge.on_failure = lambda: told.append(True)
        reasons = [[output.finish_reason for _, output in await _read(ticket)] for ticket in tickets]
        ends = [[reason for reason in each if reason is not None] for each in reasons]
        assert ends == [["error"], ["stop"] if at == "end" else ["error"], ["error"]]
        assert bridge.num_open == 0
        assert bridge.state == "engine failed"
        with pytest.raises(Unavailable, match="engine has failed"):
            await bridge.submit([_request("later")])

    bridge = _with_bridge(engine, test)
    assert isinstance(bridge.failure, ZeroDivisionError)
    assert told == [True]
    assert "a defect" in caplog.text
    while bridge.is_running:
        threading.Event().wait(0.001)
    assert engine.closed


def test_an_error_while_an_answer_is_aborted_is_a_failure_too(engine: FakeEngine) -> None:
    """Raised to whoever aborts it would leave the request with the engine."""
    engine.script, engine.max_model_len = lambda _: [40] * 10_000, 10**5

    async def test(bridge: Bridge) -> None:
        tickets = [await bridge.submit([_request(name, 9000)]) for name in ("a", "b")]
        bridge.metrics.record = lambda *_: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        tickets[0].close()
        assert [(await _read(ticket))[-1][1].finish_reason for ticket in tickets] == ["abort", "error"]

    assert isinstance(_with_bridge(engine, test).failure, ZeroDivisionError)


def test_a_place_is_kept_for_what_is_read_until_its_requests_are_known(engine: FakeEngine) -> None:
    async def test(bridge: Bridge) -> None:
        reserve = bridge.places.reserve
        with reserve(), contextlib.suppress(ZeroDivisionError), reserve() as place:
            assert _sample(bridge, "nextn_requests_reading") == 2
            bridge.check_room(2)
            with pytest.raises(Busy, match="2 requests are open"):
                bridge.check_room(3)
            place.keep(3)
            with pytest.raises(Busy), reserve():
                pass
            with pytest.raises(Busy):
                place.keep(4)  # and it keeps none any more
            bridge.check_room(3)
            place.keep(2)
            raise ZeroDivisionError
        assert _sample(bridge, "nextn_requests_reading") == 0
        with reserve() as place:
            place.keep(4)
            place.keep(0)
            ticket = await bridge.submit([_request(str(i)) for i in range(4)])
            with pytest.raises(Busy):
                bridge.check_room(1)
        await _read(ticket)
        bridge.check_room(4)

    _with_bridge(engine, test)


def test_a_report_that_hangs_holds_up_neither_the_loop_nor_the_watchdog(engine: FakeEngine) -> None:
    """Its log may go to a pipe that nobody reads; the engine is idle, so only a turn shows that it hangs."""
    reporting, release = threading.Event(), threading.Event()

    def report(*_: object) -> None:
        reporting.set()
        release.wait(10)

    async def test(bridge: Bridge) -> None:
        await _read(await bridge.submit([_request("a")]))
        await asyncio.to_thread(reporting.wait, 10)
        assert bridge.turn is not None
        started = asyncio.get_running_loop().time()
        later = asyncio.create_task(bridge.submit([_request("b")]))
        await asyncio.sleep(0)
        assert asyncio.get_running_loop().time() - started < 5
        release.set()
        await _read(await later)

    _with_bridge(engine, test, report=report, report_every=0.2)


def test_traffic_since_the_last_report_is_reported_at_the_end(engine: FakeEngine) -> None:
    reports: list[Mapping[str, float]] = []

    async def test(bridge: Bridge) -> None:
        bridge.metrics.answered("/v1/completions", 429)
        await _read(await bridge.submit([_request("a")]))
        assert reports == []

    _with_bridge(engine, test, report=lambda stats, _: reports.append(stats), report_every=1000.0)
    (report,) = reports
    assert report["turned_away"] == 1


def _sample(bridge: Bridge, name: str, **labels: str) -> float | None:
    return bridge.metrics.registry.get_sample_value(name, labels)


def test_requests_that_were_never_taken_are_counted_nowhere(engine: FakeEngine) -> None:
    """Not as aborted, nor with a time, nor as ends that make room, from which Retry-After follows."""
    engine.script, engine.step_seconds = lambda _: [40] * 1000, 0.02
    engine.max_model_len = 2000

    async def test(bridge: Bridge) -> None:
        ticket = await bridge.submit([_request("long", 1000)])
        with pytest.raises(RequestError, match="empty"):
            await bridge.submit([_request("a"), Request("b", [], SamplingParams())])
        cancelled = asyncio.create_task(bridge.submit([_request("c")]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        while len(engine.aborted) < 2:  # what the engine had taken is ended there all the same
            await asyncio.sleep(0.001)
        assert bridge.num_open == 1
        assert _sample(bridge, "nextn_requests_total", finish_reason="abort") is None
        assert _sample(bridge, "nextn_request_seconds_count") == 0
        assert list(bridge._ends._ends) == []
        ticket.close()
        assert _sample(bridge, "nextn_requests_total", finish_reason="abort") == 1

    _with_bridge(engine, test)


def test_an_answer_that_is_given_up_is_counted_and_named(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nextn.server.ticket.MAX_UNREAD_BYTES", 2000)

    async def test(bridge: Bridge) -> None:
        ticket = await bridge.submit([_request("my-id-7")])
        while not ticket.is_overrun:
            await asyncio.sleep(0.001)
        assert _sample(bridge, "nextn_slow_readers_total") == 1

    _with_bridge(engine, test)
    assert "request my-id-7: its client does not read" in caplog.text


def test_statistics_are_reported_while_there_is_traffic(engine: FakeEngine) -> None:
    """At intervals while the engine works, once after it has gone idle, then no more."""
    reports: list[tuple[Mapping[str, float], float]] = []
    engine.script = lambda _: [40] * 30
    engine.step_seconds = 0.01

    async def test(bridge: Bridge) -> None:
        await _read(await bridge.submit([_request("a")]))
        await asyncio.sleep(0.1)
        seen = len(reports)
        assert 1 <= seen <= 11
        await asyncio.sleep(0.1)
        assert len(reports) == seen

    _with_bridge(engine, test, report=lambda *report: reports.append(report), report_every=0.02)
    assert all(seconds >= 0.01 for _, seconds in reports)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    fail_at=st.none() | st.integers(1, 30),
    grace=st.sampled_from([0.0, 0.005, 10.0]),
    unread=st.sampled_from([2_000, 4 * 2**20]),
)
def test_each_request_ends_exactly_once_whatever_happens(
    seed: int, fail_at: int | None, grace: float, unread: int
) -> None:
    """Clients come, leave and do not read, the engine fails, the server ends: at any moment."""
    chance = random.Random(seed)
    engine = FakeEngine(None, lambda _: [40] * chance.randrange(60), step_seconds=0.0005, fail_at=fail_at)
    ends: dict[str, int] = {}

    async def client(bridge: Bridge, number: int) -> None:
        names = [f"{number}-{index}" for index in range(chance.randrange(1, 4))]
        await asyncio.sleep(chance.random() * 0.03)
        try:
            ticket = await bridge.submit([_request(name) for name in names])
        except (Unavailable, Busy):
            return
        ends.update(dict.fromkeys(names, 0))
        stays, patience = chance.random() < 0.7, chance.randrange(30)
        while ticket.is_open and (stays or patience):
            patience -= 1
            if chance.random() < 0.1:
                await asyncio.sleep(chance.random() * 0.02)
            index, output = await asyncio.wait_for(ticket.next(), 30)
            assert not ends[names[index]], "something came after the end"
            ends[names[index]] += output.finish_reason is not None
            if ticket.is_overrun:  # what was dropped may have been an end
                break
        else:
            if stays:
                assert [ends[name] for name in names] == [1] * len(names)
        ticket.close()

    async def test() -> None:
        bridge = Bridge(engine, max_open=6)
        bridge.start()
        clients = [asyncio.create_task(client(bridge, number)) for number in range(12)]
        await asyncio.sleep(chance.random() * 0.04)
        await bridge.stop(grace)
        await asyncio.wait_for(asyncio.gather(*clients), 30)
        assert bridge.num_open == 0
        assert bridge.is_ended
        assert (bridge.failure is None) == engine.closed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nextn.server.ticket.MAX_UNREAD_BYTES", unread)
        asyncio.run(test())


def test_an_engine_is_loaded_on_its_own_thread_and_then_taken(engine: FakeEngine) -> None:
    may_load, ready = threading.Event(), []

    def load() -> FakeEngine:
        engine.threads.add(threading.get_ident())
        assert may_load.wait(20)
        return engine

    async def test() -> None:
        bridge = Bridge(None, load=load, max_open=4, on_ready=lambda: ready.append(True))
        bridge.start()
        assert bridge.state == "loading"
        with pytest.raises(Unavailable, match="still loading"):
            await bridge.submit([_request("a")])
        with pytest.raises(Unavailable, match="still loading"):
            await bridge.check_integrity()
        may_load.set()
        while not ready:
            await asyncio.sleep(0.001)
        assert bridge.state == "ok"
        assert (await _read(await bridge.submit([_request("a")])))[-1][1].finish_reason == "stop"
        await bridge.stop()

    asyncio.run(test())
    assert len(engine.threads) == 1


@pytest.mark.parametrize("stops", [False, True])
def test_a_load_that_fails_is_a_failure_unless_the_end_has_broken_it_off(
    engine: FakeEngine, stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal may well kill the compilers and readers that a load has started."""
    may_fail = threading.Event()

    def load() -> FakeEngine:
        assert may_fail.wait(20)
        raise ConfigError("no") if not stops else RuntimeError("a child was killed")

    async def test() -> None:
        bridge = Bridge(None, load=load, max_open=4)
        bridge.start()
        if stops:
            await asyncio.wait_for(bridge.stop(10_000), 10)
            assert bridge.is_running
        may_fail.set()
        while bridge.is_running or not (stops or bridge.failure):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert bridge.state == ("stopping" if stops else "engine failed")

    asyncio.run(test())
    assert caplog.text == ""


def test_to_hurry_cuts_the_grace_short(engine: FakeEngine) -> None:
    engine.script = lambda _: [40] * 10**6
    engine.max_model_len = 10**7

    async def test(bridge: Bridge) -> None:
        ticket = await bridge.submit([_request("a", 10**6)])
        stopping = asyncio.create_task(bridge.stop(10_000))
        await asyncio.sleep(0.02)
        assert not stopping.done()
        bridge.hurry()
        await asyncio.wait_for(stopping, 20)
        assert (await _read(ticket))[-1][1].finish_reason == "error"

    assert _with_bridge(engine, test).is_ended
