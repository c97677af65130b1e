"""Faults found by attacking the engine: each test's name is the property that should hold."""

from __future__ import annotations

import time

import pytest
import torch

from nextn.engine.pages import PagePool
from nextn.engine.request import Request, SamplingParams
from nextn.engine.scheduler import Scheduler
from nextn.errors import RequestError
from tests.tiny import drain, prompt_of, request, run, tiny_engine


def test_after_a_failed_prefill_nobody_begins_with_pages_that_were_never_computed() -> None:
    """The step raises, all is closed, and the same prompt comes again: no hit on what nobody wrote."""
    engine = tiny_engine(page_size=4)
    expected = run(tiny_engine(page_size=4), [request("a", prompt_of(21, 1), max_tokens=6, temperature=0.0)])
    prefill = engine.worker.prefill

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.worker.prefill = fails  # type: ignore[method-assign, assignment]
    engine.add(request("a", prompt_of(21, 1), max_tokens=6, temperature=0.0))
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    engine.close()
    engine.worker.prefill = prefill  # type: ignore[method-assign]
    engine.add(request("a", prompt_of(21, 1), max_tokens=6, temperature=0.0))
    outputs = list(drain(engine))
    assert {output.cached_tokens for output in outputs} == {0}
    assert [token for output in outputs for token in output.token_ids] == expected["a"]


def test_a_prompt_of_anything_but_whole_numbers_is_refused_and_holds_up_nobody() -> None:
    """It is no request: left in the queue it would end every step with an error, for all others too."""
    engine = tiny_engine()
    with pytest.raises(RequestError, match="prompt"):
        engine.add(request("a", [5.0, 6.0], max_tokens=2))  # type: ignore[list-item]
    assert len(run(engine, [request("b", prompt_of(5, 1), max_tokens=2)])["b"]) == 2


@pytest.mark.parametrize("fields", [{"priority": None}, {"priority": "1"}, {"cache_salt": 5}])
def test_a_request_of_unfit_types_leaves_nothing_behind(fields: dict[str, object]) -> None:
    """Neither in the queue, where it would end every step, nor its id in use."""
    engine = tiny_engine()
    each = request("a", prompt_of(5, 1), max_tokens=2)
    for name, value in fields.items():
        setattr(each, name, value)
    with pytest.raises(RequestError, match=next(iter(fields))):
        engine.add(each)
    assert not engine.has_work()
    assert len(run(engine, [request("a", prompt_of(5, 1), max_tokens=2)])["a"]) == 2


def test_a_step_names_the_pages_of_few_long_prompts() -> None:
    """Of 64 choices that come at once most are left to later steps: rows that decode wait for each one."""
    scheduler = Scheduler(PagePool(2000, 64), 16, 2048, 4)
    tokens = list(range(60_000))

    def slowest(count: int) -> float:
        for choice in range(count):
            scheduler.add(Request(str(choice), tokens, SamplingParams(), choice=choice))
        started = time.perf_counter()
        assert scheduler.next_batch() is not None
        taken = time.perf_counter() - started
        for choice in range(count):
            scheduler.remove(str(choice))
        return taken

    few = min(slowest(2) for _ in range(3))
    assert min(slowest(64) for _ in range(3)) < 8 * few
