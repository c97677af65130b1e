"""When a client that was turned away is told to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextn.server.overload import EndRate

TIMES = st.floats(0, 1e6, allow_nan=False)


@given(began=TIMES, gaps=st.lists(st.floats(0, 100), max_size=40), later=TIMES, places=st.integers(1, 10**6))
def test_the_wait_is_always_1_to_60_whole_seconds(
    began: float, gaps: list[float], later: float, places: int
) -> None:
    rate, now = EndRate(), began
    rate.begin(began)
    for gap in gaps:
        now += gap
        rate.record(now)
    assert rate.seconds_until(places, now + later) in range(1, 61)


@pytest.mark.parametrize(("places", "seconds"), [(1, 2), (4, 8), (100, 60)])
def test_the_wait_is_what_the_rate_of_ends_says(places: int, seconds: int) -> None:
    """One ends every two seconds."""
    rate = EndRate()
    rate.begin(1000.0)
    for count in range(1, 21):
        rate.record(1000.0 + 2 * count)
    assert rate.seconds_until(places, 1040.0) == seconds


def test_before_anything_has_ended_the_wait_grows_with_the_time_so_far() -> None:
    rate = EndRate()
    rate.begin(50.0)
    assert [rate.seconds_until(1, 50.0 + passed) for passed in (0, 7, 600)] == [1, 7, 60]


def test_an_idle_stretch_does_not_count() -> None:
    """An hour without requests says nothing about how fast they end."""
    rate = EndRate()
    rate.begin(0.0)
    rate.record(1.0)
    rate.begin(3600.0)
    for count in range(10):
        rate.record(3600.0 + count)
    assert rate.seconds_until(2, 3610.0) == 2


def test_more_ends_than_are_kept_do_not_slow_the_rate() -> None:
    rate = EndRate()
    rate.begin(0.0)
    for count in range(5000):
        rate.record(50.0 + count / 1000)
    assert rate.seconds_until(10_000, 55.0) in (10, 11)
