"""The pipeline: the engine plans and launches a step before it knows what the one before brought.

A GPU's worker returns from a launch at once. Here a CPU's step has run when it is launched, and the engine,
told that two may be in flight, delivers it one step late, as it does there; what it plans is then the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.grammar import Grammar
from nextn.engine.graphs import Shape, buckets, run_step
from nextn.engine.launched import Launched, LaunchedPrefill
from nextn.engine.request import Output, Request, SamplingParams
from nextn.engine.scheduler import Chunk, Running
from nextn.engine.state import StepBatch
from nextn.engine.stats import StepReport
from tests.compare import assert_close
from tests.grammars import grammar_engine
from tests.tiny import drain, poison_freed_pages, prompt_of, request, run, tiny_engine, tokens_of

SPEC = SpecConfig(2, 2, 4)


def _ahead(engine: Engine) -> Engine:
    """Let two of the engine's steps be in flight."""
    engine.depth = 2
    return engine


def _requests(seed: int, count: int, temperature: float) -> list[Request]:
    draw = random.Random(seed)
    return [
        request(
            str(i),
            prompt_of(draw.randint(1, 30), seed + i),
            max_tokens=draw.randint(1, 25),
            temperature=temperature,
            seed=i,
            ignore_eos=draw.random() < 0.5,
            prompt_logprobs=draw.choice((None, None, 1)),
        )
        for i in range(count)
    ]


def _alone(each: Request, **config: Any) -> list[int]:
    """The request's tokens in an engine of its own, decoded plainly."""
    copy = Request("alone", each.prompt_tokens, each.params, choice=each.choice)
    return run(tiny_engine(**{"spec": None, "max_running_requests": 1, **config}), [copy])["alone"]


@settings(max_examples=12)
@given(
    st.integers(0, 10_000),
    st.sampled_from([None, SPEC]),
    st.sampled_from([0.0, 0.8]),
    st.integers(16, 60),
    st.sampled_from([3, 8, 64]),
)
def test_tokens_are_those_of_an_engine_that_waits(
    seed: int, spec: SpecConfig | None, temperature: float, pages: int, chunk: int
) -> None:
    """Rows that end at different times, more requests than rows, prompts in chunks, pages that run out."""
    kwargs = {
        "spec": spec, "max_running_requests": 3, "page_size": 4, "num_pages": pages, "max_model_len": 56,
        "chunked_prefill_size": chunk,
    }  # fmt: skip
    expected = run(tiny_engine(**kwargs), _requests(seed, 5, temperature))
    assert run(_ahead(tiny_engine(**kwargs)), _requests(seed, 5, temperature)) == expected


def test_prefill_and_decode_are_launched_before_what_came_before_is_known() -> None:
    """A row's first cycle starts behind its prefill, whose token is still on the device."""
    engine = _ahead(tiny_engine(spec=SPEC))
    engine.add(request("a", prompt_of(9, 1), max_tokens=20, temperature=0.0))
    assert engine.step() == []  # the prefill is launched
    assert [type(flying) for flying in engine._flying] == [LaunchedPrefill]
    (first,) = engine.step()  # the first cycle is launched, then the prefill lands
    assert len(first.token_ids) == 1
    assert [type(flying) for flying in engine._flying] == [Launched]
    (entry,) = engine.scheduler.running
    assert (entry.length, entry.ahead) == (9, SPEC.width)
    (output,) = engine.step()
    assert output.token_ids
    assert len(engine._flying) == 1
    assert entry.ahead == SPEC.width


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_no_step_runs_for_a_row_whose_token_limit_is_in_flight(limit: int) -> None:
    """Each step brings a token at least: plainly as many run as tokens are asked for, in sight or not."""
    engine = _ahead(tiny_engine(spec=None))
    steps: list[StepReport] = []
    engine.on_step = steps.append
    tokens = run(engine, [request(str(i), prompt_of(9, i), max_tokens=limit + i) for i in range(2)])
    assert [len(each) for each in tokens.values()] == [limit, limit + 1]
    rows = [report.rows for report in steps if report.kind == "decode"]
    assert rows == [2] * (limit - 1) + [1]


def test_a_request_for_one_token_does_not_hold_the_next_prompt_up() -> None:
    """No decode step stands between, though there is always a row with its first token in flight."""
    engine = _ahead(tiny_engine(spec=SPEC, max_running_requests=2))
    steps: list[StepReport] = []
    engine.on_step = steps.append
    run(engine, [request(str(i), prompt_of(9, i), max_tokens=1) for i in range(6)])
    assert {report.kind for report in steps} == {"prefill"}


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_steps_are_in_flight_than_the_depth(depth: int) -> None:
    """Also not while a step that ends a request is planned around."""
    engine = tiny_engine(spec=SPEC, max_running_requests=2, chunked_prefill_size=7)
    engine.depth = depth
    most, launched, landed = 0, 0, 0
    launch, prefill = engine.worker.launch, engine.worker.prefill
    waits = {Launched: Launched.wait, LaunchedPrefill: LaunchedPrefill.wait}

    def note(start: Any) -> Any:
        def started(*args: Any, **kwargs: Any) -> Any:
            nonlocal launched, most
            launched += 1
            most = max(most, launched - landed)
            return start(*args, **kwargs)

        return started

    with pytest.MonkeyPatch.context() as patch:
        for kind, wait in waits.items():

            def noted(self: Any, wait: Any = wait) -> Any:
                nonlocal landed
                landed += 1
                return wait(self)

            patch.setattr(kind, "wait", noted)
        patch.setattr(engine.worker, "launch", note(launch))
        patch.setattr(engine.worker, "prefill", note(prefill))
        run(engine, _requests(1, 6, 0.8))
    assert launched == landed
    assert most == depth


@pytest.mark.parametrize("when", range(1, 8))
@pytest.mark.parametrize("chunk", [4, 64])
def test_an_abort_in_flight_ends_once_and_leaves_nothing(when: int, chunk: int) -> None:
    """A step, prefill or decode, that runs for an aborted row is dropped; its pages are free for others."""
    engine = _ahead(
        tiny_engine(
            spec=SPEC, max_running_requests=2, page_size=4, num_pages=24, max_model_len=40,
            chunked_prefill_size=chunk,
        )
    )  # fmt: skip
    poison_freed_pages(engine)
    kept = request("kept", prompt_of(9, 3), max_tokens=20, temperature=0.0)
    following = request("next", prompt_of(12, 4), max_tokens=8, temperature=0.0)
    engine.add(request("gone", prompt_of(9, 2), max_tokens=25, temperature=0.0))
    engine.add(kept)
    outputs = [output for _ in range(when) for output in engine.step()]
    engine.abort("gone")
    engine.check_integrity()
    engine.add(following)
    outputs += engine.step()
    engine.add(request("gone", prompt_of(9, 2), max_tokens=5, temperature=0.0))  # the id is free again
    outputs += list(drain(engine))
    finals = [output.request_id for output in outputs if output.finish_reason is not None]
    assert sorted(finals) == ["gone", "gone", "kept", "next"]
    tokens = tokens_of(outputs)
    assert tokens["kept"] == _alone(kept)
    assert tokens["next"] == _alone(following)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
def test_a_row_that_ended_runs_once_too_often_and_nobody_sees_it(
    spec: SpecConfig | None, max_tokens: int
) -> None:
    """By its limit, in its first token already; the pages go to requests that wait for them."""
    engine = _ahead(
        tiny_engine(spec=spec, max_running_requests=2, page_size=4, num_pages=14, max_model_len=44)
    )
    poison_freed_pages(engine)
    requests = [
        request(str(r), prompt_of(11 + r, r), max_tokens=max_tokens + 9 * (r % 2), temperature=0.9, seed=r)
        for r in range(6)
    ]
    tokens = run(engine, requests)
    for each in requests:
        assert tokens[each.request_id] == _alone(each)
    assert engine.counters.generated_tokens == sum(map(len, tokens.values()))


def test_no_step_writes_beyond_the_pages_of_its_row() -> None:
    """Page tables point to a guard page wherever a row has no page of its own; it stays untouched."""
    engine = _ahead(tiny_engine(spec=SpecConfig(3, 4, 8), max_running_requests=3, page_size=4, num_pages=80))
    (guard,) = engine.pool.allocate(1)
    engine.worker.state.page_table.fill_(guard)
    for each in _requests(7, 6, 0.8):
        engine.add(each)
    while engine.has_work():
        engine.step()
    assert engine.worker.state.cache[:, guard].isnan().all()


def test_the_shape_may_change_between_steps_in_flight() -> None:
    """Plain, tree, another tree and back, one step each: the text is that of plain decoding."""
    engine = _ahead(tiny_engine(spec=SPEC, max_draft_tokens=8))
    each = request("a", prompt_of(9, 1), max_tokens=40, temperature=0.0)
    expected = _alone(each)
    engine.add(each)
    shapes = [None, SPEC, SpecConfig(3, 4, 8), None, None, SpecConfig(1, 1, 2)]
    tokens: list[int] = []
    for count in range(200):
        if not engine.has_work():
            break
        engine.set_spec(shapes[count % len(shapes)])
        for output in engine.step():
            tokens += output.token_ids
    assert tokens == expected


def test_rows_decode_between_the_chunks_of_a_long_prompt() -> None:
    """Neither two prefill steps in a row while a request decodes, nor two decode steps before the last."""
    engine = _ahead(tiny_engine(spec=SPEC, chunked_prefill_size=8, page_size=4, num_pages=200))
    engine.add(request("short", prompt_of(5, 1), max_tokens=80, temperature=0.0))
    for _ in range(3):
        engine.step()
    kinds: list[str] = []
    launch, prefill = engine.worker.launch, engine.worker.prefill
    engine.worker.launch = lambda *a, **k: kinds.append("decode") or launch(*a, **k)  # type: ignore
    engine.worker.prefill = lambda *a, **k: kinds.append("prefill") or prefill(*a, **k)  # type: ignore
    engine.add(request("long", prompt_of(60, 2), max_tokens=5, temperature=0.0))
    outputs: list[Output] = []
    while not any(output.request_id == "long" for output in outputs):
        outputs += engine.step()
    assert kinds.count("prefill") == 8
    first, last = kinds.index("prefill"), len(kinds) - kinds[::-1].index("prefill")
    assert kinds[first:last] == ["prefill", "decode"] * 7 + ["prefill"]
    list(drain(engine))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_settled_tokens_are_in_both_caches(depth: int, plain: bool) -> None:
    """After every step: the device's draft has at least as many entries as others may use."""
    engine = tiny_engine(spec=SPEC, chunked_prefill_size=6)
    engine.depth = depth
    worker, state = engine.worker, engine.worker.state
    for r in range(3):
        engine.add(request(str(r), prompt_of(4 + 9 * r, r), max_tokens=60, temperature=0.8, seed=r))
    shapes = (None, None, None, SPEC) if plain else (SPEC,)
    seen = 0
    for step in range(60):
        engine.set_spec(shapes[step % len(shapes)])
        engine.step()
        for entry in engine.scheduler.running:
            settled = worker.settled_tokens(entry)
            if engine._streams[entry.request.request_id].entry is not entry:
                continue  # its row is not prepared yet
            assert 0 <= settled <= int(state.draft_len[entry.row]) <= int(state.n[entry.row])
            assert settled <= entry.length
            seen = max(seen, settled)
    assert seen > 30


def test_no_step_is_launched_while_the_tokens_before_a_grammar_s_next_are_in_flight() -> None:
    """Neither its first, behind the prefill, nor any later; the text is that of an engine that waits."""

    def requests() -> list[Request]:
        return [
            Request(
                str(r),
                prompt_of(12 + r, r),
                SamplingParams(
                    max_tokens=20,
                    seed=r,
                    grammar=Grammar("regex", "[ab]{2,5}(,[ab]{2,5}){0,3}") if r % 2 else None,
                    ignore_eos=r % 2 == 0,
                ),
            )
            for r in range(4)
        ]

    expected = run(grammar_engine(spec=SPEC), requests())
    engine = _ahead(grammar_engine(spec=SPEC, chunked_prefill_size=5, max_running_requests=2))
    launch, ahead = engine.worker.launch, []

    def note(entries: tuple[Running, ...], *args: Any, **kwargs: Any) -> Any:
        for entry in entries:
            known = len(entry.request.prompt_tokens) + len(entry.request.output_tokens)
            is_known = entry.ahead == 0 and entry.length == known - 1
            ahead.append((entry.request.params.grammar is not None, is_known))
        return launch(entries, *args, **kwargs)

    engine.worker.launch = note  # type: ignore[method-assign]
    assert run(engine, requests()) == expected
    assert (True, False) not in ahead
    assert {(True, True), (False, False)} <= set(ahead)


def test_closing_drops_what_is_in_flight() -> None:
    """No output comes afterwards, no page is held, and the engine serves the next request."""
    engine = _ahead(tiny_engine(spec=SPEC))
    engine.add(request("a", prompt_of(9, 1), max_tokens=20, temperature=0.0))
    for _ in range(3):
        engine.step()
    engine.close()
    assert not engine.has_work()
    engine.check_integrity()
    each = request("a", prompt_of(9, 1), max_tokens=6, temperature=0.0)
    assert run(engine, [each])["a"] == _alone(each)


def _decoding(spec: SpecConfig | None) -> Engine:
    """Three rows past their prefill."""
    engine = tiny_engine(spec=spec)
    for i in range(3):
        engine.add(request(str(i), prompt_of(5 + 4 * i, i), max_tokens=30, temperature=0.8 * (i % 2), seed=i))
    while engine.scheduler.waiting or not all(entry.is_prefilled for entry in engine.scheduler.running):
        engine.step()
    return engine


@pytest.mark.parametrize("spec", [None, SPEC, SpecConfig(3, 4, 8)])
def test_padding_a_batch_with_the_scratch_row_changes_nothing(spec: SpecConfig | None) -> None:
    """Tokens are those of the unpadded batch, states to rounding; the padding writes no page."""
    results, rows = [], []
    for padding in (0, 5):
        engine = _decoding(spec)
        state = engine.worker.state
        live = [entry.row for entry in engine.scheduler.running]
        batch = StepBatch(
            rows=torch.tensor([*live, *[state.scratch_row] * padding]),
            live=torch.tensor([True] * len(live) + [False] * padding),
            pages=state.page_table.shape[1],
            any_sampled=True,
        )
        shape = Shape(spec, any_sampled=True)
        state.page_table[state.scratch_row] = live[0]
        with torch.inference_mode():
            for _ in range(3):
                result = run_step(engine.worker.models, state, batch, shape, engine.worker.options)
        results.append(result[: len(live)])
        rows.append((state.n[live], state.draft_state[live], state.cache))
    assert_close(results[1], results[0], "bitwise")
    for padded, alone in zip(rows[1], rows[0], strict=True):
        assert_close(padded, alone, "fp64")


@given(st.integers(1, 5000))
def test_buckets_hold_every_batch_and_waste_less_than_half(rows: int) -> None:
    """Ascending, the largest batch last, each at most twice the one before."""
    sizes = buckets(rows)
    assert sizes[0] == 1
    assert sizes[-1] == rows
    assert all(a < b <= 2 * a for a, b in pairwise(sizes))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_that_landed_is_reported_once_with_what_it_did(depth: int) -> None:
    """Their tokens are all that was computed and emitted; their times do not overlap."""
    engine = tiny_engine(max_running_requests=3, chunked_prefill_size=20)
    engine.depth = depth
    reports: list[StepReport] = []
    engine.on_step = reports.append
    started = time.perf_counter()
    run(engine, _requests(5, 6, 0.7))
    elapsed = time.perf_counter() - started
    counters, kinds = engine.counters, [each.kind for each in reports]
    assert (kinds.count("prefill"), kinds.count("decode")) == (counters.prefill_steps, counters.decode_steps)
    assert sum(each.tokens for each in reports if each.kind == "prefill") == counters.prompt_tokens
    assert sum(each.tokens for each in reports if each.kind == "decode") >= counters.generated_tokens - 6
    assert all(each.seconds >= 0 and each.rows >= 1 for each in reports)
    assert sum(each.seconds for each in reports) <= elapsed


def test_a_prompt_is_looked_up_once_whatever_happens_to_its_request_later() -> None:
    """Preempted requests are computed again, which says nothing of how often prompts were cached."""
    engine = tiny_engine(num_pages=8, max_model_len=100, max_running_requests=3)
    requests = [request(str(i), prompt_of(20, i), max_tokens=60, temperature=0.0) for i in range(3)]
    run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert engine.counters.queried_tokens == 60
    assert engine.counters.prompt_tokens > 60


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_delivered_before_a_launch_that_holds_up_the_host(seed: int) -> None:
    """No prefill step that is slow to launch finds a decode step in flight; texts are those alone."""
    engine = _ahead(tiny_engine(max_running_requests=4, chunked_prefill_size=16, page_size=4))
    prefill, slow = engine.worker.prefill, list[bool]()

    def launches_slowly(entries: Sequence[Running]) -> bool:
        return sum(entry.missing for entry in entries) > 12

    def checked(chunks: Sequence[Chunk]) -> LaunchedPrefill:
        # A request that was admitted just now was not foreseen.
        if known and launches_slowly(known):
            slow.append(True)
            assert not any(isinstance(flying, Launched) for flying in engine._flying)
        return prefill(chunks)

    engine.worker.launches_slowly = launches_slowly  # type: ignore[method-assign]
    engine.worker.prefill = checked  # type: ignore[method-assign]
    requests = _requests(seed, 8, 0.7)
    requests.insert(3, request("long", prompt_of(90, seed), max_tokens=3, temperature=0.7, seed=seed))
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    left = list(requests)
    while left or engine.has_work():
        if left:
            engine.add(left.pop(0))
        known = engine.scheduler.upcoming_prefill()
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    assert slow
    for each in requests:
        assert tokens[each.request_id] == _alone(each)
