"""Speculation changes nothing: token for token the text of plain decoding, whatever the tree, batch or pages.

In float64 the products of one row and of several differ far less than two tokens' scores ever do by chance,
so equality is exact (facts: in float32 a false flip comes about once in 150,000 tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from nextn.config import SpecConfig
from tests.tiny import prompt_of, request, run, tiny_engine

SHAPES = ("1/1/2", "1/4/4", "2/1/3", "2/4/4", "3/1/4", "3/4/8", "4/2/6", "5/8/32")
BATCHES = (1, 2, 3, 8)
PAGES = (1, 16, 64)
LENGTHS = ("1", "2", "3", "page-1", "page", "page+1", "3 pages+5")
TEMPERATURES = (0.0, 0.8)
OUTPUT = 20

Case = tuple[str, int, int, str, float]


def _grid() -> Iterator[Case]:
    yield from product(SHAPES, BATCHES, PAGES, LENGTHS, TEMPERATURES)


def _pairwise() -> list[Case]:
    """A subset of the grid in which every pair of values of two dimensions occurs (greedy, deterministic)."""
    cases = list(_grid())
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs(case)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[int, int, object, object]]:
    return {(i, j, case[i], case[j]) for i in range(len(case)) for j in range(i)}


def _length(text: str, page: int) -> int:
    named = {"page-1": page - 1, "page": page, "page+1": page + 1, "3 pages+5": 3 * page + 5}
    return max(1, named[text] if text in named else int(text))


@cache
def _plain(prompt: tuple[int, ...], temperature: float, seed: int) -> list[int]:
    """The reference: one request alone, no speculation."""
    engine = tiny_engine(spec=None, max_running_requests=1)
    return run(engine, [request("r", list(prompt), max_tokens=OUTPUT, temperature=temperature, seed=seed)])[
        "r"
    ]


def _check(case: Case) -> float:
    """Run one case; returns the acceptance length."""
    shape, batch, page, length, temperature = case
    # The first row has the case's length, the others the lengths that follow it.
    names = [LENGTHS[(LENGTHS.index(length) + row) % len(LENGTHS)] for row in range(batch)]
    prompts = [prompt_of(_length(name, page), seed=row) for row, name in enumerate(names)]
    engine = tiny_engine(
        spec=SpecConfig.parse(shape), page_size=page, num_pages=4096 // page, max_running_requests=batch,
        chunked_prefill_size=37,
    )  # fmt: skip
    requests = [
        request(str(row), prompt, max_tokens=OUTPUT, temperature=temperature, seed=row)
        for row, prompt in enumerate(prompts)
    ]
    texts = run(engine, requests)
    for row, prompt in enumerate(prompts):
        assert texts[str(row)] == _plain(tuple(prompt), temperature, row), f"row {row} of {case}"
    return engine.counters.acceptance.length


@pytest.mark.parametrize("case", _pairwise(), ids=lambda case: "-".join(str(part) for part in case))
def test_speculation_gives_the_tokens_of_plain_decoding(case: Case) -> None:
    """Every pair of shape, batch, page size, prompt length and temperature."""
    assert _check(case) >= 1.0


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_whole_grid_gives_the_tokens_of_plain_decoding(shape: str, temperature: float) -> None:
    """Every combination of the grid."""
    cases = [case for case in _grid() if case[0] == shape and case[4] == temperature]
    assert min(_check(case) for case in cases) >= 1.0


def test_the_tiny_model_accepts_drafts_often_enough_to_test_anything() -> None:
    """Guards the tests above: a model that never accepts would pass them all."""
    engine = tiny_engine(spec=SpecConfig(3, 4, 8), max_running_requests=8)
    run(
        engine,
        [request(str(row), prompt_of(9, row), max_tokens=60, temperature=0.8, seed=row) for row in range(8)],
    )
    assert engine.counters.acceptance.length > 1.5
    assert set(engine.counters.acceptance.by_length) == {1, 2, 3, 4}
