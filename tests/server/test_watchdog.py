"""The watchdog without its thread: what counts as a hang, and what is said of one."""

from __future__ import annotations

import logging

import pytest

from nextn.server import watchdog
from nextn.server.watchdog import StepTimeout, Watchdog, stacks


class _Bridge:
    """A bridge whose engine's turn is what the test says."""

    def __init__(self) -> None:
        self.turn: int | None = None
        self.failure: BaseException | None = None
        self.failures: list[BaseException] = []
        self.is_ended = False

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)


def _looked(bridge: _Bridge, step_timeout: float, turns: list[int | None]) -> None:
    made = Watchdog(bridge, step_timeout, lambda: None)  # type: ignore[arg-type]
    for turn in turns:
        bridge.turn = turn
        made._check_step()


@pytest.mark.parametrize(
    "turns", [[None] * 10_000, list(range(10_000)), [1, 1, None] * 3000, [1, 1, 2] * 3000]
)
def test_neither_idleness_nor_many_steps_are_a_hang(turns: list[int | None]) -> None:
    """One turn is looked at, not the time since the start."""
    bridge = _Bridge()
    _looked(bridge, 1.0, turns)
    assert bridge.failures == []


def test_a_turn_seen_for_too_long_is_a_hang_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Only what the watchdog has seen itself counts: while the process is stopped it sees nothing."""
    bridge = _Bridge()
    with caplog.at_level(logging.CRITICAL):
        _looked(bridge, 1.0, [7] * round(1.0 / watchdog._TICK))
        assert bridge.failures == []
        _looked(bridge, 1.0, [7] * 100)
    (failure,) = bridge.failures
    assert isinstance(failure, StepTimeout)
    (record,) = caplog.records
    assert "test_a_turn_seen_for_too_long" in record.getMessage()


def test_without_a_limit_nothing_is_a_hang() -> None:
    bridge = _Bridge()
    _looked(bridge, 0.0, [7] * 10_000)
    assert bridge.failures == []


@pytest.mark.parametrize(
    ("ended", "failure", "status"), [(True, None, 0), (False, None, 1), (True, RuntimeError(), 1)]
)
def test_an_end_that_is_overdue_has_the_status_that_it_deserves(
    monkeypatch: pytest.MonkeyPatch, ended: bool, failure: BaseException | None, status: int
) -> None:
    left: list[int] = []
    monkeypatch.setattr(watchdog, "leave", lambda status, _: left.append(status))
    bridge = _Bridge()
    bridge.is_ended, bridge.failure = ended, failure
    Watchdog(bridge, 1.0, lambda: None)._check_end()  # type: ignore[arg-type]
    Watchdog(bridge, 1.0, lambda: float("inf"))._check_end()  # type: ignore[arg-type]
    assert left == []
    Watchdog(bridge, 1.0, lambda: 0.0)._check_end()  # type: ignore[arg-type]
    assert left[0] == status


def test_stacks_name_every_thread() -> None:
    assert "Thread MainThread:" in stacks()
    assert "test_stacks_name_every_thread" in stacks()
