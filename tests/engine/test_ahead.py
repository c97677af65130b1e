"""Running ahead: the engine starts a step before it knows what the one before brought, and nothing shows.

A GPU's worker returns from `launch` at once; here the CPU's worker says that it does, which makes the engine
deliver every step one step late, as it does there.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.graphs import Shape, buckets, run_step
from nextn.engine.state import StepBatch
from nextn.engine.worker import Worker
from tests.compare import assert_close
from tests.tiny import drain, prompt_of, request, run, tiny_engine

SPEC = SpecConfig(2, 2, 4)


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker of this file runs ahead, unless a test says otherwise."""
    monkeypatch.setattr(Worker, "runs_ahead", True)


def _requests(seed: int, count: int, temperature: float) -> list[Any]:
    draw = random.Random(seed)
    return [
        request(
            str(i),
            prompt_of(draw.randint(1, 30), seed + i),
            max_tokens=draw.randint(1, 25),
            temperature=temperature,
            seed=i,
            ignore_eos=draw.random() < 0.5,
        )
        for i in range(count)
    ]


@settings(max_examples=12)
@given(
    st.integers(0, 10_000), st.sampled_from([None, SPEC]), st.sampled_from([0.0, 0.8]), st.integers(16, 60)
)
def test_tokens_are_those_of_an_engine_that_waits(
    seed: int, spec: SpecConfig | None, temperature: float, pages: int
) -> None:
    """Rows that end at different times, more requests than rows, and pages that run out."""
    kwargs = {
        "spec": spec,
        "max_running_requests": 3,
        "page_size": 4,
        "num_pages": pages,
        "max_model_len": 56,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "runs_ahead", False)
        expected = run(tiny_engine(**kwargs), _requests(seed, 5, temperature))
    assert run(tiny_engine(**kwargs), _requests(seed, 5, temperature)) == expected


def test_a_step_is_under_way_while_the_one_before_is_delivered() -> None:
    """Outputs come one step late, and two steps of a lone row are never both unknown at a delivery's end."""
    engine = tiny_engine(spec=SPEC)
    engine.add(request("a", prompt_of(9, 1), max_tokens=20, temperature=0.0))
    assert len(engine.step()) == 1  # the prefill brings the first token
    assert engine.step() == []  # the first cycle starts
    assert engine._flying is not None
    (output,) = engine.step()  # the second starts, the first is delivered
    assert output.token_ids
    assert engine._flying is not None
    assert engine.scheduler.running[0].ahead == SPEC.width


@pytest.mark.parametrize("when", range(2, 7))
def test_an_abort_under_way_ends_once_and_leaves_nothing(when: int) -> None:
    """The step that runs for an aborted row is dropped; its pages are free at once for others to take."""
    engine = tiny_engine(spec=SPEC, max_running_requests=2, page_size=4, num_pages=24, max_model_len=40)
    kept = request("kept", prompt_of(9, 3), max_tokens=20, temperature=0.0)
    expected = run(
        tiny_engine(spec=None), [request("kept", prompt_of(9, 3), max_tokens=20, temperature=0.0)]
    )["kept"]
    engine.add(request("gone", prompt_of(9, 2), max_tokens=25, temperature=0.0))
    engine.add(kept)
    outputs = []
    for _ in range(when):
        outputs += engine.step()
    engine.abort("gone")
    engine.check_integrity()
    engine.add(request("next", prompt_of(12, 4), max_tokens=8, temperature=0.0))
    outputs += list(drain(engine))
    finals = [output for output in outputs if output.finish_reason is not None]
    assert sorted(output.request_id for output in finals) == ["gone", "kept", "next"]
    assert [t for output in outputs if output.request_id == "kept" for t in output.token_ids] == expected


def test_no_step_writes_beyond_the_pages_of_its_row() -> None:
    """Page tables point to a guard page wherever a row has no page of its own; it stays untouched."""
    engine = tiny_engine(spec=SpecConfig(3, 4, 8), max_running_requests=3, page_size=4, num_pages=80)
    (guard,) = engine.pool.allocate(1)
    engine.worker.state.page_table.fill_(guard)
    for each in _requests(7, 6, 0.8):
        engine.add(each)
    while engine.has_work():
        engine.step()
    assert engine.worker.state.cache[:, guard].isnan().all()


def test_the_shape_may_change_between_steps_under_way() -> None:
    """Plain, tree, another tree and back, one step each: the text is that of plain decoding."""
    engine = tiny_engine(spec=SPEC, max_draft_tokens=8)
    expected = run(tiny_engine(spec=None), [request("a", prompt_of(9, 1), max_tokens=40, temperature=0.0)])[
        "a"
    ]
    engine.add(request("a", prompt_of(9, 1), max_tokens=40, temperature=0.0))
    shapes = [None, SPEC, SpecConfig(3, 4, 8), None, None, SpecConfig(1, 1, 2)]
    tokens: list[int] = []
    for count in range(200):
        if not engine.has_work():
            break
        engine.set_spec(shapes[count % len(shapes)])
        for output in engine.step():
            tokens += output.token_ids
    assert tokens == expected


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
