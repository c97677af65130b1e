"""The pace of prefill: chunks take about as long as asked for, whatever the machine; no clock is involved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nextn.config import ModelConfig
from nextn.engine.pace import MANY_TILES, MIN_CHUNK, OUTLIER, PRODUCTS, PrefillPace
from tests.tiny import TINY

V3 = json.loads((Path(__file__).parents[1] / "data" / "dsv3-full.json").read_text())


class _Span(NamedTuple):
    start: int
    length: int


def _warm(scale: float, linear: float = 1.0, **weights: float) -> PrefillPace:
    """A pace of one second a step that has learnt `scale` seconds a FLOP."""
    weights = {"attended": 0.0, "reread": 0.0, **weights}
    pace = PrefillPace(linear, max_seconds=1.0, **weights)  # type: ignore[arg-type]
    pace.observe([_Span(0, 1)], 1e9)
    pace.observe([span := _Span(0, 1000)], scale * _flops([span], linear, **weights))
    return pace


def _flops(
    spans: Sequence[_Span], linear: float, attended: float, reread: float, fixed: float = 0.0
) -> float:
    """Counted token by token: token i attends i + 1/2 tokens on average of both its ends."""
    total = fixed
    for start, length in spans:
        total += linear * length + reread * (start + length)
        total += sum(attended * (position + 0.5) for position in range(start, start + length))
    return total


def test_before_anything_was_measured_the_whole_budget_is_granted() -> None:
    """And the first step, which compiles, is no measurement."""
    pace = PrefillPace(1.0, 0.0, 0.0, max_seconds=1.0)
    assert pace.limit(0, 5000) == 5000
    pace.observe([_Span(0, 5000)], 600.0)
    assert pace.limit(0, 5000) == 5000


@given(
    st.integers(0, 20_000), st.integers(1, 4000), st.floats(1e-6, 1e-3), st.floats(0, 0.01), st.floats(0, 1),
    st.floats(0, 300),
)  # fmt: skip
def test_the_limit_is_all_that_is_in_time(
    start: int, wanted: int, scale: float, attended: float, reread: float, fixed: float
) -> None:
    """Of the tokens wanted, all if they take at most the time, else the whole tiles that do; at least one."""
    weights = {"linear": 1.0, "attended": attended, "reread": reread, "fixed": fixed}
    limit = _warm(scale, **weights).limit(start, wanted)
    assert min(wanted, MIN_CHUNK) <= limit <= wanted
    if limit > MIN_CHUNK:
        assert scale * _flops([_Span(start, limit)], **weights) <= 1.0 + 1e-9
    if limit < wanted:
        many = limit >= MANY_TILES * MIN_CHUNK
        assert not many or limit % MIN_CHUNK == 0
        more = limit + (MIN_CHUNK if many else 1)
        assert scale * _flops([_Span(start, more)], **weights) >= 1.0 - 1e-9


def test_chunks_of_one_step_share_its_time() -> None:
    """What the first leaves goes to the second; where it leaves nothing, the second waits."""
    pace = _warm(2.0**-10)
    assert pace.limit(0, 640) == 640
    assert pace.limit(0, 2000, [_Span(0, 640)]) == 384
    assert pace.limit(0, 2000, [_Span(0, 300), _Span(700, 24)]) == 640
    assert pace.limit(0, 2000, [_Span(0, 300), _Span(700, 700)]) == 24
    assert pace.limit(0, 2000, [_Span(0, 1024)]) == 0


def test_the_longer_the_text_so_far_the_shorter_the_chunk() -> None:
    """Each token attends all before it, and all before it are expanded anew."""
    pace = _warm(1e-4, attended=1e-3, reread=0.02)
    limits = [pace.limit(start, 100_000) for start in (0, 10_000, 50_000, 100_000)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > 2 * limits[-1] > 0


def test_one_outlier_changes_nothing_and_a_slower_machine_does() -> None:
    """A first compilation of some shape comes once; what comes twice is how it is."""
    pace, span = _warm(2.0**-10), _Span(0, 1000)
    for seconds in (50.0, 1.01, 50.0):
        pace.observe([span], seconds)
        assert pace.limit(0, 10_000) in (896, 1024)
    for _ in range(10):
        pace.observe([span], 2.0 * OUTLIER)
    assert pace.limit(0, 10_000) == MIN_CHUNK
    for _ in range(10):
        pace.observe([span], 0.5)
    assert pace.limit(0, 10_000) in range(1900, 2001)


def test_short_steps_say_nothing_of_long_ones() -> None:
    """A prompt of five tokens takes a fiftieth of a second; the next long one gets its whole chunk still."""
    pace = _warm(2.0**-10)
    for _ in range(100):
        pace.observe([_Span(0, 5)], 0.02)
    assert pace.limit(0, 10_000) == 1024


@pytest.mark.parametrize("base", [0.0, 0.02, 0.3])
def test_the_limit_settles_where_steps_take_the_time_asked_for(base: float) -> None:
    """Even if a part of a step's time has nothing to do with its tokens, and all steps so far were short."""
    pace = PrefillPace(1.0, 0.0, 0.0, max_seconds=0.5)

    def step(length: int) -> float:
        seconds = base + length / 10_000
        pace.observe([_Span(0, length)], seconds)
        return seconds

    for _ in range(60):
        step(30)
    taken = [step(pace.limit(0, 100_000)) for _ in range(40)]
    assert max(taken) <= 0.5
    assert taken[-1] >= 0.45
    assert sum(taken) >= 0.75 * 40 * 0.5, "it takes long to settle"


def test_the_weights_of_v3_are_its_flops() -> None:
    """37 billion active parameters, of which embedding and head do nothing in prefill; 0.5 more to draft."""
    pace = PrefillPace.of(ModelConfig.from_dict(V3), 0.2)
    # With what makes keys and values, which is counted by tokens reread.
    assert pace._linear / PRODUCTS + pace._reread == pytest.approx(2 * 37e9, rel=0.05)
    assert pace._attended == 2 * 62 * 128 * (192 + 128)


def test_a_model_without_drafts_low_rank_queries_or_experts_has_weights_too() -> None:
    """All that a config may lack."""
    full = PrefillPace.of(ModelConfig.from_dict(TINY), 0.2)
    plain = PrefillPace.of(
        ModelConfig.from_dict(
            {**TINY, "num_nextn_predict_layers": 0, "q_lora_rank": None, "n_routed_experts": 0}
        ),
        0.2,
    )
    assert 0 < plain._attended < full._attended
    assert plain._linear > 0
