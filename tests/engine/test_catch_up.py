"""Drafts that plain decoding left behind: one pass of fixed shape brings up any of them, and nothing else.

The pass is replayed as a graph, so it may not depend on which rows are real, nor on how far each is behind.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.graphs import CATCH_UP, Shape, run_step
from nextn.engine.state import RING, StepBatch
from nextn.engine.step import StepOptions
from nextn.kernels import ops
from nextn.models.weights import Models
from tests.compare import assert_close
from tests.e2e.test_draft_state import _check_row
from tests.tiny import prompt_of, request, tiny_engine, tiny_models

SPEC = SpecConfig(2, 4, 4)
PAGE = 4


def rows_behind(
    amounts: list[int], models: Models | None = None, options: StepOptions | None = None
) -> Engine:
    """An engine whose i-th running request has taken amounts[i] plain steps since its prefill.

    The rows hold pages for these steps and for a tree; requests know their tokens.
    """
    engine = tiny_engine(
        models, options, spec=SPEC, max_running_requests=8, page_size=PAGE, max_model_len=120, num_pages=240
    )
    for i in range(len(amounts)):
        engine.add(request(str(i), prompt_of(3 + 5 * i, i), max_tokens=80, temperature=0.0))
    while engine.scheduler.waiting or not all(entry.is_prefilled for entry in engine.scheduler.running):
        engine.step()
    worker, entries = engine.worker, engine.scheduler.running
    for entry in entries:
        worker.state.set_pages(entry.row, entry.pages + engine.pool.allocate(RING // PAGE + 2))
    for step in range(max(amounts)):
        going = [entry for entry, amount in zip(entries, amounts, strict=True) if amount > step]
        batch = batch_of(engine, [entry.row for entry in going])
        with torch.inference_mode():
            result = run_step(worker.models, worker.state, batch, Shape(None), worker.options)
        for entry, (_, token) in zip(going, result.tolist(), strict=True):
            entry.request.output_tokens.append(token)
    return engine


def batch_of(engine: Engine, rows: list[int], padding: int = 0) -> StepBatch:
    """The step of `rows` as a graph sees it: padded with the scratch row, the page table at full width."""
    state = engine.worker.state
    return StepBatch(
        rows=torch.tensor([*rows, *[state.scratch_row] * padding]),
        live=torch.tensor([True] * len(rows) + [False] * padding),
        pages=state.page_table.shape[1],
    )


def bring_up(engine: Engine, batch: StepBatch) -> None:
    """One captured kind of step, run as it is recorded."""
    worker = engine.worker
    with torch.inference_mode():
        result = run_step(worker.models, worker.state, batch, CATCH_UP, worker.options)
    assert result.tolist() == [[0]] * batch.size


def poison_scratch(engine: Engine) -> int:
    """Make the scratch row look behind, its states NaN; its pages are one page of NaN, which is returned."""
    state = engine.worker.state
    (guard,) = engine.pool.allocate(1)
    state.page_table[state.scratch_row] = guard
    state.n[state.scratch_row], state.draft_len[state.scratch_row] = 9, 2
    state.draft_state[state.scratch_row] = float("nan")
    state.ring_hidden[state.scratch_row] = float("nan")
    return guard


def held(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of all that a step could change."""
    state = engine.worker.state
    names = ("cache", "n", "draft_len", "root", "page_table", "draft_state", "ring_hidden", "ring_token")
    return {name: getattr(state, name).clone() for name in names}


@settings(max_examples=12)
@given(st.lists(st.integers(0, RING), min_size=1, max_size=5), st.integers(0, 3), st.booleans())
def test_any_rows_get_the_draft_of_a_fresh_prefill(amounts: list[int], padding: int, post_norm: bool) -> None:
    """Rows behind by different amounts in one batch, none to the whole ring, beside poisoned padding."""
    engine = rows_behind(amounts, options=StepOptions(post_norm=post_norm))
    guard = poison_scratch(engine)
    entries = engine.scheduler.running
    bring_up(engine, batch_of(engine, [entry.row for entry in entries], padding))
    for entry in entries:
        _check_row(engine, entry, post_norm)
    assert engine.worker.state.cache[:, guard].isnan().all()


def test_all_amounts_of_the_ring_are_brought_up_at_once() -> None:
    """Rows behind by 0, 1, ... RING - 1, RING, eight in a batch."""
    for first in range(0, RING + 1, 8):
        amounts = [min(first + i, RING) for i in range(8)]
        engine = rows_behind(amounts)
        entries = engine.scheduler.running
        bring_up(engine, batch_of(engine, [entry.row for entry in entries]))
        for entry in entries:
            _check_row(engine, entry)


def test_only_what_is_behind_changes() -> None:
    """The target's cache, rows that are up to date, padding and rows that are not live keep every bit."""
    engine = rows_behind([0, 5, RING, 17])
    poison_scratch(engine)
    state = engine.worker.state
    rows = [entry.row for entry in engine.scheduler.running]
    batch = batch_of(engine, rows, padding=2)
    batch.live[3] = False
    before = held(engine)
    bring_up(engine, batch)
    after = held(engine)
    for name in ("n", "root", "page_table", "ring_hidden", "ring_token"):
        assert_close(after[name], before[name], "bitwise", what=name)
    assert_close(after["cache"][:-1], before["cache"][:-1], "bitwise", what="target latents")
    kept = [rows[0], rows[3], state.scratch_row]
    for name in ("draft_len", "draft_state"):
        assert_close(after[name][kept], before[name][kept], "bitwise", what=name)
    positions = torch.arange(120).unsqueeze(0)
    kept_slots = state.slots(state.page_table[kept], positions.expand(3, -1))
    flat = [copies["cache"][-1].flatten(0, 1)[kept_slots] for copies in (after, before)]
    assert_close(flat[0], flat[1], "bitwise", what="NextN latents")
    assert after["draft_len"][rows[1:3]].tolist() == after["n"][rows[1:3]].tolist()


def test_a_second_pass_changes_nothing() -> None:
    """Nothing is behind any more, so every row and page keeps its bits."""
    engine = rows_behind([3, RING, 0])
    batch = batch_of(engine, [entry.row for entry in engine.scheduler.running], padding=1)
    bring_up(engine, batch)
    before = held(engine)
    bring_up(engine, batch)
    for name, tensor in held(engine).items():
        assert_close(tensor, before[name], "bitwise", what=name)


def test_kernels_bring_up_what_their_twins_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, in Triton's interpreter: poisoned padding reaches no row and no page."""
    amounts = [0, 3, RING]
    drafts = []
    for on_kernels in (False, True):
        engine = rows_behind(amounts, tiny_models(dtype=torch.bfloat16))
        guard = poison_scratch(engine)
        rows = [entry.row for entry in engine.scheduler.running]
        with monkeypatch.context() as patch:
            patch.setattr(ops, "on_gpu", lambda _, answer=on_kernels: answer)
            bring_up(engine, batch_of(engine, rows, padding=1))
        state = engine.worker.state
        assert state.cache[:, guard].isnan().all()
        assert state.draft_len[rows].tolist() == state.n[rows].tolist()
        positions = torch.arange(int(state.n[rows].max())).expand(len(rows), -1)
        slots = state.slots(state.page_table[rows], positions)
        cached = state.cache[-1].flatten(0, 1)[slots][positions < state.n[rows].unsqueeze(1)]
        drafts.append((cached, state.draft_state[rows]))
    for kernels, twins, what in zip(*reversed(drafts), ("latents", "states"), strict=True):
        assert_close(kernels, twins, "bf16-attention", what=what)
