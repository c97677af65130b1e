"""What a soak would notice: drift, leaks, wrong endings; and that a sound engine passes."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest

from bench import soak
from bench.drift import MIN_P, Memory, StepTimes, permutation_p, theil_sen
from bench.soak import Ledger, Soak
from bench.traffic import GRAMMARS, Plan, Traffic
from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.request import Output, Request, SamplingParams
from nextn.errors import RequestError
from tests.tiny import tiny_engine


def steps(slowdown: float) -> StepTimes:
    """Forty blocks of noisy steps of two kinds, in uneven numbers, slower by `slowdown` at the end."""
    times, rng = StepTimes(), random.Random(3)
    for block in range(40):
        for kind, ms in (("one row", 5.0), ("many rows", 20.0)):
            for _ in range(rng.randint(5, 40)):
                times.add(block, kind, ms * (1 + slowdown * block / 39) * rng.uniform(0.9, 1.1))
    return times


def test_a_slow_drift_is_told_from_noise() -> None:
    """Ten percent over a run is found though the mix of steps varies far more, and none where none is."""
    level, rising = steps(0.0).change(), steps(0.10).change()
    assert level is not None
    assert rising is not None
    assert level.is_noise
    assert abs(level.change) < 0.02
    assert not rising.is_noise
    assert rising.change == pytest.approx(0.075, abs=0.02)
    assert rising.slope == pytest.approx(0.10, abs=0.03)
    assert StepTimes().change() is None


def test_no_verdict_on_step_times_is_one_that_could_not_be_bad() -> None:
    """For every number of blocks: no verdict, or one that finds steps that take twice as long at the end."""
    verdicts = []
    for blocks in range(41):
        times = StepTimes()
        for block in range(blocks):
            for _ in range(5):
                times.add(block, "kind", 20.0 if block >= blocks // 2 else 10.0)
        verdicts.append(times.change())
    assert all(each is None or (each.p < MIN_P and not each.is_noise) for each in verdicts)
    assert sum(each is not None for each in verdicts) >= 20


def test_the_statistics_are_what_their_names_say() -> None:
    """A median slope, and a p that is small only for groups that differ."""
    assert theil_sen([1.0, 2.0, 3.0, 4.0, 90.0]) == 1.0
    assert permutation_p([1.0, 2.0, 3.0, 2.5, 1.5], [11.0, 12.0, 13.0, 12.5, 11.5]) < 0.01
    assert permutation_p([1.0, 2.0, 3.0], [3.0, 1.0, 2.0]) == 1.0


def test_a_leak_is_told_from_a_peak_and_from_a_warm_up() -> None:
    """What stays counts, from the second quarter on."""
    flat, leak = Memory(32), Memory(32)
    for block in range(40):
        start = 1000 if block < 5 else 2000
        for memory, size in ((flat, start), (leak, start + 10 * block)):
            memory.add(block, size)
            memory.add(block, size + 5000)
    for memory, expected in ((flat, True), (leak, False)):
        growth = memory.growth()
        assert growth is not None
        assert growth.is_flat is expected
    assert Memory(1).growth() is None


def ledger(engine: Engine | None = None) -> Ledger:
    return Ledger(Traffic(engine or tiny_engine(), 200, 0, ["text"]), kept=2, seed=0)


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        ([Output("a", "", (5,), 3, 1, "abort")], "ending"),
        ([Output("a", "", (5, 6), 3, 2, "length"), Output("a", "", (), 3, 2, "length")], "ending"),
        ([Output("a", "", (5,), 3, 2)], "tokens"),
        ([Output("a", "", (5,), 3, 1, "length")], "tokens"),
        ([Output("a", "", (), 3, 0, "error", error="broken")], "error"),
    ],
)
def test_what_goes_wrong_with_a_request_is_a_fault(outputs: list[Output], kind: str) -> None:
    """An end that nobody asked for, a second end, wrong counts, an error."""
    book = ledger()
    book.begin(Plan(Request("a", [1, 2, 3], SamplingParams(max_tokens=2)), "greedy"))
    for each in outputs:
        book.take(each)
    assert book.faults == {kind: 1}
    assert len(book.named) == 1


def test_traffic_is_the_seed_s_and_all_of_it_can_be_served_but_what_is_to_be_refused() -> None:
    """Every draw is valid for the engine; among many are several answers, aborts, salts and priorities."""
    engine = tiny_engine()
    streams = [Traffic(engine, 200, 7, ["text"]) for _ in range(2)]
    plans = [[plan for _ in range(120) for plan in stream.draw()] for stream in streams]
    assert [plan.request for plan in plans[0]] == [plan.request for plan in plans[1]]
    for plan in plans[0]:
        engine.validate(plan.request.prompt_tokens, plan.request.params)
    assert any(plan.request.choice for plan in plans[0])
    assert any(plan.abort_after == 0 for plan in plans[0])
    assert len({plan.request.priority for plan in plans[0]}) == 3
    assert len({plan.request.cache_salt for plan in plans[0]}) > 2
    for _ in range(10):
        with pytest.raises(RequestError):
            engine.add(streams[0].draw_refused())


@pytest.mark.parametrize("longest", [64, 128, 256])
def test_no_request_is_drawn_above_the_longest(longest: int) -> None:
    """Whatever the prompt is made of, and though an answer with a grammar has room to end."""
    traffic = Traffic(tiny_engine(), longest, 3, ["text"])
    traffic._has_grammars = True
    seen = set()
    for _ in range(1500):
        for plan in traffic.draw():
            request = plan.request
            assert 0 < len(request.prompt_tokens) <= longest - request.params.max_tokens
            seen.add(plan.option)
            plan.tokens = [5] * request.params.max_tokens
            traffic.ended(plan)
    assert seen > set(GRAMMARS)
    for plan in traffic.draw_longest() + traffic.draw_growing():
        assert len(plan.request.prompt_tokens) + plan.request.params.max_tokens <= longest


def run(engine: Engine, seconds: float) -> Soak:
    args = argparse.Namespace(minutes=seconds / 60, longest=120, replay=4, seed=1)
    long = Soak(engine, 4, args)
    long.run()
    return long


def test_a_sound_engine_passes_and_the_report_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Two seconds with a pool that preempts; replays bring the same text."""
    engine = tiny_engine(spec=SpecConfig(2, 4, 4), max_running_requests=4, num_pages=14)
    good, result = run(engine, 2.0).report()
    out = capsys.readouterr().out
    assert good, out
    assert out.rstrip().endswith("PASSED")
    assert result["alone"]["held"] is True
    assert result["counts"]["requests"] > 10
    json.dumps(result)


def test_an_engine_that_fails_or_loses_a_request_ends_the_soak_with_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The failure and the requests without an end are named."""
    engine = tiny_engine(max_running_requests=4)
    step, count = engine.step, iter(range(10**6))

    def failing() -> list[Output]:
        if next(count) == 20:
            raise RuntimeError("the device is gone")
        return step()

    monkeypatch.setattr(engine, "step", failing)
    good, result = run(engine, 30.0).report()
    assert not good
    assert result["errors"]["held"] is False
    assert result["endings"]["held"] is False
    assert "the device is gone" in capsys.readouterr().out


def test_an_interrupt_aborts_what_is_open_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """Every request still ends once, and the pages add up."""
    engine = tiny_engine(max_running_requests=4)
    long = Soak(engine, 4, argparse.Namespace(minutes=1.0, longest=120, replay=4, seed=1))
    step, count = long._step, iter(range(10**6))

    def stepping() -> None:
        long.stop = long.stop or next(count) == 20
        step()

    long._step = stepping  # type: ignore[method-assign]
    long.run()
    good, result = long.report()
    assert good
    assert result["interrupted"]
    assert result["counts"]["abort"] >= 1
    assert "interrupted; until then: PASSED" in capsys.readouterr().out


def test_a_soak_of_no_minutes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 with a sentence."""
    assert soak.main(["demo", "--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err
    assert Path(soak.TEXTS).is_file()
