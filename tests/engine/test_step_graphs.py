"""What is recorded at the start is all that decoding needs, and padded batches in buckets give the same text.

CUDA graphs are replaced by what they stand for: a step that is run again over the same buffers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.engine import graphs, worker
from nextn.engine.engine import Engine
from nextn.engine.grammar import Grammar
from nextn.engine.graphs import CATCH_UP, Shape, StepGraphs
from nextn.engine.request import Request
from nextn.engine.state import RING
from nextn.engine.worker import Worker
from nextn.models.weights import Models
from tests.e2e.test_draft_state import _check_row
from tests.grammars import grammar_engine, spell
from tests.tiny import prompt_of, request, run, tiny_engine, tiny_models

SPEC = SpecConfig(2, 4, 4)
ROWS = 5


class Replay:
    """Runs the step again and leaves the result where the first run left it."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self.step, self.result = step, step()

    def replay(self) -> None:
        self.result.copy_(self.step())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Lets `StepGraphs` record on a CPU; the shapes that were replayed, in order."""
    seen: list[Shape] = []
    run_graph = StepGraphs.run

    def record(step: Callable[[], Tensor], _stream: object, _pool: object) -> tuple[Replay, Tensor]:
        replay = Replay(step)
        return replay, replay.result

    def run_and_note(self: StepGraphs, rows: list[int], shape: Shape, *args: Any, **kwargs: Any) -> Any:
        seen.append(shape)
        result, clock = run_graph(self, rows, shape, *args, **kwargs)
        return result[: len(rows)].clone(), clock  # as the copy to pinned memory, before the next replay

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "_taken", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(StepGraphs, "run", run_and_note)
    return seen


def _engine(models: Models | None = None, spec: SpecConfig | None = SPEC) -> Engine:
    """An engine that decodes by recorded steps."""
    engine = tiny_engine(models, spec=spec, max_running_requests=ROWS, page_size=4, max_model_len=160)
    engine.worker.capture(spec, ROWS)
    return engine


def _forbid_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may be recorded or run op by op."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("not recorded at the start")

    monkeypatch.setattr(graphs, "record", refuse)
    monkeypatch.setattr(worker, "run_step", refuse)


def _requests() -> list[Request]:
    """More than there are rows; they join and leave at different steps, most after several rings."""
    return [
        request(
            str(i),
            prompt_of(4 + 3 * i, i),
            max_tokens=(20, 75, 100)[i % 3],
            temperature=0.8 * (i % 2),
            seed=i,
        )
        for i in range(ROWS + 3)
    ]


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
def test_plain_decoding_beside_a_draft_runs_recorded_steps_only(
    spec: SpecConfig | None, replays: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are caught up as the ring fills, by a graph of the start; the text is that of no draft."""
    models = tiny_models()
    alone = Models(models.target, None, models.cfg)
    expected = run(tiny_engine(alone, spec=None, max_running_requests=ROWS), _requests())
    engine = _engine(spec=spec)
    _forbid_the_rest(monkeypatch)
    engine.set_spec(None)
    assert run(engine, _requests()) == expected
    assert 2 <= replays.count(CATCH_UP) < len(replays) / 8


def test_drafts_are_whole_after_plain_decoding_by_recorded_steps(
    replays: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that began at different steps; the first cycle after some 50 plain ones finds a whole draft."""
    engine = _engine()
    _forbid_the_rest(monkeypatch)
    monkeypatch.setattr(Worker, "runs_ahead", False)
    engine.set_spec(None)
    for i in range(3):
        engine.add(request(str(i), prompt_of(5 + 4 * i, i), max_tokens=90, temperature=0.8, seed=i))
        for _ in range(1 + 9 * i):
            engine.step()
    for _ in range(RING - 1):
        engine.step()
    engine.set_spec(SPEC)
    engine.step()
    assert [shape.spec for shape in replays[-2:]] == [None, SPEC]
    assert replays[-2] == CATCH_UP
    assert len(engine.scheduler.running) == 3
    for entry in engine.scheduler.running:
        _check_row(engine, entry)


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_with_grammars_are_recorded_in_parts_and_give_the_same_text(
    spec: SpecConfig | None, temperature: float, replays: list[Shape]
) -> None:
    """Rows with and without a grammar in padded batches; once none has one, plain graphs run again."""

    def requests() -> list[Request]:
        found = []
        for i in range(ROWS + 3):
            grammar = Grammar("regex", "[ab]{3,9}(,[ab]{1,9}){0,3}") if i % 3 else None
            params = {
                "temperature": temperature,
                "seed": i,
                "grammar": grammar,
                "ignore_eos": grammar is None,
            }
            found.append(request(str(i), prompt_of(4 + 3 * i, i), max_tokens=30 + 8 * (i % 2), **params))
        return found

    def engine() -> Engine:
        return grammar_engine(spec=spec, max_running_requests=ROWS, page_size=4, max_model_len=160)

    expected = run(engine(), requests())
    recorded = engine()
    recorded.worker.capture(spec, ROWS)
    assert run(recorded, requests()) == expected
    assert {shape.any_grammar for shape in replays} == {False, True}
    for each in requests():
        if each.params.grammar is not None:
            assert re.fullmatch("[ab]{3,9}(,[ab]{1,9}){0,3}", spell(expected[each.request_id]))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.7},
    {"frequency_penalty": 0.6},
    {"logit_bias": ((3, 4.0), (7, -100.0))},
    {"min_tokens": 9, "stop_token_ids": (5,)},
    {"temperature": 0.0, "presence_penalty": 0.9},
    {"top_k": 3, "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
def test_every_mix_of_options_runs_by_graphs_of_the_start(
    spec: SpecConfig | None, replays: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options come and go with the rows; each answer is that of the request alone, launched op by op."""

    def requests() -> list[Request]:
        knobs = [{"temperature": 0.8} | options for options in OPTIONS]
        return [
            request(str(i), prompt_of(4 + 3 * i, i), max_tokens=12 + 5 * i, seed=i, **each)
            for i, each in enumerate(knobs)
        ]

    alone = {}
    for each in requests():
        alone |= run(tiny_engine(spec=None, max_running_requests=1), [each])
    engine = _engine(spec=spec)
    _forbid_the_rest(monkeypatch)
    assert run(engine, requests()) == alone
    assert len({shape.recorded for shape in replays}) < len(set(replays))


@pytest.mark.usefixtures("replays")
def test_the_graphs_of_most_tokens_are_recorded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catch-up of the largest bucket comes first; without a NextN layer there is none."""
    order: list[tuple[int, Shape]] = []
    get = StepGraphs._get

    def get_and_note(self: StepGraphs, bucket: int, shape: Shape) -> object:
        order.append((bucket, shape))
        return get(self, bucket, shape)

    monkeypatch.setattr(StepGraphs, "_get", get_and_note)
    _engine()
    tokens = [bucket * shape.nodes for bucket, shape in order]
    assert tokens == sorted(tokens, reverse=True)
    assert order[0] == (ROWS, CATCH_UP)
    assert {shape for _, shape in order} == {
        CATCH_UP, *(Shape(spec, any_sampled=sampled) for spec in (None, SPEC) for sampled in (False, True)),
        *(Shape(spec, any_filter=True).recorded for spec in (None, SPEC)),
    }  # fmt: skip
    models = tiny_models()
    order.clear()
    _engine(Models(models.target, None, models.cfg), None)
    assert {shape.spec for _, shape in order} == {None}
    assert CATCH_UP not in {shape for _, shape in order}


def test_a_step_that_cannot_be_captured_for_want_of_memory_runs_op_by_op(
    replays: list[Shape], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same tokens, one warning, and no second try; what was captured before goes on."""
    engine, tries = _engine(), list[object]()
    first = run(engine, [request("a", prompt_of(7, 1), max_tokens=8, temperature=0.0, logprobs=1)])

    def fails(*key: object) -> None:
        tries.append(key)
        raise torch.OutOfMemoryError("CUDA out of memory")

    other = _engine()
    monkeypatch.setattr(other.worker.graphs, "_capture", fails)
    replays.clear()
    assert run(other, [request("a", prompt_of(7, 1), max_tokens=8, temperature=0.0, logprobs=1)]) == first
    assert not replays
    assert len(tries) == len(set(tries)) == 1
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    run(other, [request("b", prompt_of(7, 1), max_tokens=8, temperature=0.0)])
    assert replays
