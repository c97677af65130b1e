"""What the load test measures, on records and traces made by hand and on the tiny engine."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench import scenarios, serve
from bench.http_load import Load, take
from bench.load import SHAREGPT, Cycles, Job, LogNormal, Point, Record, Run, Session, figures, make_jobs
from nextn.config import SpecConfig
from nextn.engine import busy
from nextn.engine.request import Output
from nextn.errors import ConfigError
from tests.tiny import prompt_of, tiny_engine


def output(name: str, new: int, total: int) -> Output:
    """An output that brings `new` tokens, of `total` so far."""
    return Output(name, "", (5,) * new, prompt_tokens=10, completion_tokens=total)


def test_drawn_lengths_have_the_mean_they_name() -> None:
    """Before they are cut, within 3 % of 40,000 draws."""
    rng = random.Random(0)
    for each in SHAREGPT:
        uncut = LogNormal(each.mean, each.sigma, 0, 10**9)
        drawn = statistics.fmean(uncut.draw(rng) for _ in range(40_000))
        assert drawn == pytest.approx(each.mean, rel=0.03)


def test_jobs_are_drawn_by_the_seed_share_their_prefix_and_fit() -> None:
    """Whatever the lengths, prompt and answer together are no longer than a request may be."""
    jobs = [make_jobs(50, SHAREGPT, vocab=40, max_len=300, shared_prefix=16, seed=4) for _ in range(2)]
    assert jobs[0] == jobs[1]
    assert len({tuple(job.prompt[:16]) for job in jobs[0]}) == 1
    assert len({tuple(job.prompt) for job in jobs[0]}) > 40
    assert all(job.output_len >= 1 and len(job.prompt) + job.output_len <= 300 for job in jobs[0])


def test_another_salt_gives_other_tokens_of_the_same_lengths() -> None:
    """So that a run finds nothing of an earlier one in the cache."""
    one, other = (make_jobs(20, SHAREGPT, vocab=40, max_len=300, seed=4, salt=salt) for salt in "ab")
    assert [(len(job.prompt), job.output_len) for job in one] == [
        (len(job.prompt), job.output_len) for job in other
    ]
    assert one != other


def test_no_session_finds_what_another_has_computed() -> None:
    """The same prompts and name again: nothing comes from the cache, though within a session it does."""
    engine = tiny_engine()
    for _ in range(2):
        session = Session(engine, name="load")
        for _ in range(2):
            session.add(Job(prompt_of(64, seed=1), 2))
            session.drain()
        assert [record.cached_tokens for record in session.records.values()] == [0, 48]


def test_arrivals_by_a_clock_are_a_poisson_process_and_closed_loops_start_at_once() -> None:
    """The mean gap is the rate's inverse, and gaps are as spread as their mean."""
    due = list(Point(rate=4.0).arrivals(20_000, seed=1))
    gaps = [b - a for a, b in pairwise(due)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert set(Point(concurrency=4).arrivals(9, seed=1)) == {0.0}


def test_latencies_count_from_when_a_request_was_due() -> None:
    """Waiting is part of the time to first token; a step's tokens are one gap; failures count apart."""
    good = Record(
        due=1.0, prompt_tokens=10, times=[2.0, 2.5, 3.5], tokens=7, cached_tokens=5, cycles=2, emitted=6
    )
    bad = Record(due=0.0, prompt_tokens=99, times=[9.0], tokens=1, failed="error")
    found = figures([good, bad], seconds=2.0)
    assert (found["ttft_p50_ms"], found["tpot_p50_ms"], found["gap_p50_ms"]) == (1000.0, 250.0, 750.0)
    assert (found["requests"], found["failed"], found["requests_per_s"]) == (1, 1, 0.5)
    assert (found["output_tokens_per_s"], found["accept_length"], found["cached_share"]) == (3.5, 3.0, 0.5)
    assert good.gaps(2.6, 3.0) == [1.0]


def test_only_steps_that_decode_alone_are_cycles() -> None:
    """Not where prompts were computed, where a first token came, after a pause, or where nothing came."""
    cycles = Cycles()
    pair = [output("a", 2, 6), output("b", 1, 9)]
    for now, outputs, prefilled in (
        (1.0, pair, False),  # follows on nothing
        (1.1, pair, False),
        (1.3, pair, True),
        (1.4, [output("a", 1, 1)], False),
        (1.5, [], False),
        (1.6, pair, False),
    ):
        cycles.observe(outputs, now, prefilled)
    cycles.pause()
    cycles.observe(pair, 9.0, prefilled=False)
    assert [(median.occupancy, median.cycles) for median in cycles.medians(1)] == [(2, 2)]
    assert cycles.medians(1)[0].ms == pytest.approx(100.0)
    assert cycles.medians(1)[0].context == 17.5
    assert cycles.decode_share == pytest.approx(1 / 3)


def test_a_closed_loop_keeps_its_number_open_and_ends_every_request() -> None:
    """Never more than the concurrency; records add up with what the engine counts."""
    engine = tiny_engine(spec=SpecConfig(2, 4, 4))
    jobs = [Job(prompt_of(5 + index, seed=index), 9) for index in range(7)]
    session = Session(engine)
    run = Run(session, jobs, Point(concurrency=3), seed=0)
    most = 0
    while not run.is_done:
        run.advance()
        most = max(most, len(session.open))
    session.drain()
    assert most == 3
    assert [record.tokens for record in session.records.values()] == [9] * 7
    assert all(record.ended and record.failed is None for record in session.records.values())
    assert sum(record.cycles for record in session.records.values()) == engine.stats()["cycles"]


def test_a_trace_counts_overlapping_launches_once_and_names_the_pauses(tmp_path: Path) -> None:
    """Host events do not count; all idle time is held against decode steps."""
    events = [
        {"cat": "kernel", "name": "a", "ts": 0.0, "dur": 4.0},
        {"cat": "kernel", "name": "b", "ts": 2.0, "dur": 1.0},
        {"cat": "cuda_runtime", "name": "launch", "ts": 4.0, "dur": 5.0},
        {"cat": "gpu_memcpy", "name": "c", "ts": 9.0, "dur": 1.0},
        {"name": "no category", "ph": "M"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    seen = busy.read(path)
    assert (seen.span_us, seen.busy_us, seen.launches) == (10.0, 5.0, 3)
    assert seen.pauses == [busy.Pause(5.0, "a", "c")]
    assert seen.share_in_decode(0.8) == pytest.approx(1 - 5 / 8)


def test_a_streamed_answer_s_deliveries_are_its_chunks_with_text() -> None:
    """The usage gives the number of tokens; the ending without text is no delivery; an error is raised."""
    record = Record(due=0.0, prompt_tokens=3)
    usage = {
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "speculation": {"cycles": 2, "accepted_tokens": 2},
    }
    for now, event in enumerate(
        ({"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}, {"choices": [], "usage": usage}), start=1
    ):
        take(record, event, float(now))
    assert (record.times, record.tokens, record.cached_tokens) == ([1.0], 5, 2)
    assert (record.cycles, record.emitted) == (2, 4)
    with pytest.raises(OSError, match="overloaded"):
        take(record, {"error": {"message": "overloaded"}}, 4.0)


class Answering:
    """A server that answers each request with the same events."""

    model = "demo"

    def __init__(self, event: object) -> None:
        self._event = event

    def metrics(self) -> dict[str, float]:
        """It has no such page."""
        return {}

    def stream(self, _body: dict[str, Any]) -> Iterator[Any]:
        """One delivery, then the event, which may be an error to raise."""
        yield {"choices": [{"text": "a"}]}
        if isinstance(self._event, Exception):
            raise self._event
        yield self._event


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [], "usage": {"total_tokens": 3}},
        {"choices": None},
        {"choices": ["text"]},
        ["a list"],
        None,
        {"error": "overloaded"},
        TimeoutError(),
    ],
    ids=repr,
)
def test_every_request_leaves_a_record_whatever_the_server_sends(event: object) -> None:
    """What is no completion counts as failed, with a reason."""
    load = Load(Answering(event), 0.0)  # type: ignore[arg-type]
    load.run([Job([5, 6], 3)] * 4, Point(concurrency=2), seed=0)
    assert load.done == len(load.records) == 4
    assert all(record.failed for record in load.records)
    assert figures(load.records, load.seconds)["failed"] == 4


def test_an_error_that_nobody_foresaw_ends_the_load() -> None:
    """It does not pass for a request that went well."""
    load = Load(Answering(AssertionError("a defect")), 0.0)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a defect"):
        load.run([Job([5, 6], 3)] * 2, Point(concurrency=2), seed=0)
    assert load.done == 2


@pytest.mark.parametrize("error", [ConfigError("the second point fails"), KeyboardInterrupt()], ids=repr)
def test_a_sweep_that_is_cut_short_keeps_what_it_has_measured(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first point's line is in the file when the second one fails or is interrupted."""
    monkeypatch.setattr(serve, "_engine", lambda *_: tiny_engine())
    measure = serve.measure

    def failing(engine: Any, point: Point, args: argparse.Namespace) -> Any:
        if point.concurrency == 2:
            raise error
        return measure(engine, point, args)

    monkeypatch.setattr(serve, "measure", failing)
    path = tmp_path / "new" / "out.jsonl"
    flags = ["--requests", "2", "--concurrency", "1,2", "--lengths", "fixed", "--input-len", "6"]
    flags += ["--output-len", "4", "--jsonl", str(path)]
    if isinstance(error, ConfigError):
        assert serve.main(["demo", *flags]) == 2
    else:
        with pytest.raises(KeyboardInterrupt):
            serve.main(["demo", *flags])
    assert [json.loads(text)["point"] for text in path.read_text().splitlines()] == ["concurrency 1"]


@pytest.mark.parametrize(
    ("run", "sizes", "blamed"),
    [
        ("long-prompt", {"long_prompt": 512, "stream_prompt": 8}, "--long-prompt 512 and a token"),
        ("long-prompt", {"long_prompt": 200, "stream_prompt": 512}, "--stream-prompt 512 and a token"),
        (
            "prefix-hit",
            {"shared_prompt": 500, "new_tokens": 12},
            "--shared-prompt 500 and --new-tokens 12 and",
        ),
    ],
)
def test_a_scenario_that_does_not_fit_names_the_flags_that_are_too_large(
    run: str, sizes: dict[str, int], blamed: str
) -> None:
    """Not another one, which would do."""
    with pytest.raises(ConfigError, match=f"^{blamed}.* 512 tokens of a request"):
        scenarios.SCENARIOS[run](tiny_engine(), argparse.Namespace(seed=0, temperature=0.0, **sizes))


def test_a_sweep_prints_a_row_a_point_with_and_without_speculation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And beside the decode cycle of each occupancy that of such a batch alone; one JSON object each."""
    engine = tiny_engine(spec=SpecConfig(2, 4, 4))
    monkeypatch.setattr(serve, "_engine", lambda *_: engine)
    monkeypatch.setattr(serve, "MIN_CYCLES", 3)
    flags = [
        "--requests",
        "4",
        "--concurrency",
        "2",
        "--lengths",
        "fixed",
        "--input-len",
        "6",
        "--output-len",
        "24",
    ]
    path = tmp_path / "out.jsonl"
    assert serve.main(["demo", *flags, "--spec-compare", "--cycle-reference", "--jsonl", str(path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[2] for row in rows if row.startswith("concurrency 2") and "rows" not in row] == [
        "2/4/4",
        "plain",
    ]
    results = [json.loads(text) for text in path.read_text().splitlines()]
    loads = [each for each in results if each["kind"] == "load"]
    assert [each["requests"] for each in loads] == [4, 4]
    assert 1.0 < loads[0]["accept_length"] <= 3.0
    assert {"date", "device", "commit", "ttft_p99_ms", "preemptions"} <= set(loads[0])
    cycles = [each for each in results if each["kind"] == "cycle"]
    assert {each["spec"] for each in cycles} == {"2/4/4", "plain"}
    assert all(math.isfinite(each["deviation_percent"]) for each in cycles)


def test_scenarios_measure_what_they_name_on_the_tiny_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A long prompt among streams, and a cached prefix, whose tokens the JSON counts."""
    engine = tiny_engine(max_running_requests=3)
    monkeypatch.setattr(serve, "_engine", lambda *_: engine)
    monkeypatch.setattr("bench.scenarios.SETTLED", 4)
    path = tmp_path / "out.jsonl"
    sizes = ["--long-prompt", "200", "--stream-prompt", "8", "--streams", "2"]
    assert serve.main(["demo", "--scenario", "long-prompt", *sizes, "--jsonl", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["gap_p50_ms"] <= found["gap_p99_ms"] <= found["gap_max_ms"]
    assert found["gaps"] >= 2
    sizes = ["--shared-prompt", "64", "--new-tokens", "3", "--repeats", "2"]
    assert serve.main(["demo", "--scenario", "prefix-hit", *sizes, "--jsonl", str(path)]) == 0
    assert json.loads(path.read_text())["hit_cached_tokens"] >= 48
    assert "from the cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--url", "http://x", "--spec-compare"],
        ["--concurrency", "2", "--request-rate", "1"],
        ["--concurrency", "two"],
        ["--request-rate", "0"],
        ["--requests", "0"],
    ],
)
def test_flags_that_cannot_work_are_refused_with_a_sentence(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, before anything is loaded."""
    assert serve.main(["demo", *flags]) == 2
    assert "bench.serve: --" in capsys.readouterr().err


def test_simulated_lengths_reach_every_speculative_step_and_no_plain_one() -> None:
    """A load on random weights emits what it is told to."""
    engine = tiny_engine(spec=SpecConfig(2, 4, 4))
    serve.simulate(engine, 3.0, seed=0)
    session = Session(engine)
    Run(session, [Job(prompt_of(6, seed=1), 31)], Point(concurrency=1), seed=0).finish()
    assert figures(session.records.values(), 1.0)["accept_length"] == 3.0
    engine.set_spec(None)
    session = Session(engine, name="plain")
    Run(session, [Job(prompt_of(6, seed=1), 5)], Point(concurrency=1), seed=0).finish()
    assert len(session.records["plain-0"].times) == 5
    with pytest.raises(ConfigError, match="must be 1 to"):
        serve.simulate(engine, 3.0, seed=0)
