"""Speculation changes nothing: token for token the text of plain decoding, whatever the tree, batch or pages.

In float64 the products of one row and of several differ far less than two tokens' scores ever do by chance,
so equality is exact (facts: in float32 a false flip comes about once in 150,000 tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.request import FinishReason, Request, TokenLogprobs
from nextn.engine.step import draft_part
from tests.tiny import TINY, drain, prompt_of, request, run, tiny_engine

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


def _run_as_plain(
    engine: Engine, prompts: Sequence[list[int]], temperature: float, what: str
) -> dict[str, list[int]]:
    """The tokens of these prompts run together, which are those of each decoded plainly by itself."""
    requests = [
        request(str(row), prompt, max_tokens=OUTPUT, temperature=temperature, seed=row)
        for row, prompt in enumerate(prompts)
    ]
    texts = run(engine, requests)
    for row, prompt in enumerate(prompts):
        assert texts[str(row)] == _plain(tuple(prompt), temperature, row), f"row {row} of {what}"
    return texts


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
    _run_as_plain(engine, prompts, temperature, str(case))
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


@pytest.mark.parametrize(("page", "depth"), [(1, 1), (16, 2), (64, 2)])
@pytest.mark.parametrize("shape", [None, "3/4/8"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_cached_prefixes_give_the_tokens_of_prompts_computed_whole(
    shape: str | None, page: int, temperature: float, depth: int
) -> None:
    """Prompts that begin alike, at once and later, then with the answers that they had."""
    spec = SpecConfig.parse(shape) if shape else None
    engine = tiny_engine(
        spec=spec, page_size=page, num_pages=4096 // page, chunked_prefill_size=37, max_running_requests=3
    )
    engine.depth = depth
    stem = prompt_of(70, 0)
    prompts = [stem, [*stem, 5], stem, [*stem[:65], *prompt_of(9, 1)], prompt_of(12, 2)]
    for turn in range(3):
        texts = _run_as_plain(engine, prompts, temperature, f"turn {turn}")
        if turn == 1:
            prompts = [[*prompt, *texts[str(row)], 7] for row, prompt in enumerate(prompts)]
    assert engine.counters.cached_tokens >= (3 + 4 + 4) * 64


def test_the_tiny_model_accepts_drafts_often_enough_to_test_anything() -> None:
    """Guards the tests above: a model that never accepts would pass them all."""
    engine = tiny_engine(spec=SpecConfig(3, 4, 8), max_running_requests=8)
    run(
        engine,
        [request(str(row), prompt_of(9, row), max_tokens=60, temperature=0.8, seed=row) for row in range(8)],
    )
    assert engine.counters.acceptance.length > 1.5
    assert set(engine.counters.acceptance.by_length) == {1, 2, 3, 4}


EOS = frozenset({1, 7, 23})
TOKENS = st.integers(0, TINY["vocab_size"] - 1)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from((0.0, 0.3, 0.8, 1.0, 1.7)),
    "top_p": st.sampled_from((1.0, 0.5, 0.9)),
    "top_k": st.sampled_from((0, 1, 3, 12)),
    "min_p": st.sampled_from((0.0, 0.02, 0.3)),
    "frequency_penalty": st.sampled_from((0.0, 0.4, -0.6)),
    "presence_penalty": st.sampled_from((0.0, 0.7, -0.5)),
    "repetition_penalty": st.sampled_from((1.0, 1.2, 0.7)),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from((-100.0, -3.0, 2.0, 5.0)), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    "min_tokens": st.sampled_from((0, 0, 1, 5, 16)),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(TOKENS, max_size=4, unique=True).map(tuple),
    "logprobs": st.sampled_from((None, 0, 3, 20)),
    "raw_logprobs": st.booleans(),
    "prompt_logprobs": st.sampled_from((None, None, 0, 5)),
    "seed": st.integers(-(2**63), 2**63 - 1),
}


@dataclass
class Answer:
    """All that a client sees of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: tuple[FinishReason | None, str | int | None] = (None, None)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[int], int, dict[str, Any]]]:
    """Prompts, choices and parameters of one to four requests with any options."""
    found = []
    for row in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=len(OPTIONS)))
        params = {name: draw(OPTIONS[name]) for name in sorted({*names, "seed"})}
        found.append((prompt_of(draw(st.integers(1, 40)), row), draw(st.integers(0, 2)), params))
    return found


def _answers(drawn: list[tuple[list[int], int, dict[str, Any]]], **config: Any) -> list[Answer]:
    """Run the requests together in a new engine."""
    return _answers_of(tiny_engine(**config), drawn)


def _answers_of(engine: Engine, drawn: list[tuple[list[int], int, dict[str, Any]]]) -> list[Answer]:
    """Run the requests together; every output's log-probabilities must match its tokens."""
    engine.eos_token_ids = EOS
    answers = [Answer() for _ in drawn]
    for row, (prompt, choice, params) in enumerate(drawn):
        each = request(str(row), prompt, max_tokens=16, **params)
        engine.add(Request(each.request_id, each.prompt_tokens, each.params, choice=choice))
    for output in drain(engine):
        answer = answers[int(output.request_id)]
        asked = drawn[int(output.request_id)][2].get("logprobs")
        assert [each.token_id for each in output.logprobs] == (
            list(output.token_ids) if asked is not None else []
        )
        assert output.prompt_logprobs is None or not answer.tokens, "not the first output"
        answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
        answer.tokens += output.token_ids
        answer.logprobs += output.logprobs
        answer.finish = (output.finish_reason, output.stop_reason)
    return answers


def _check_answer(answer: Answer, prompt: list[int], params: dict[str, Any]) -> None:
    """What the options themselves promise of any answer."""
    ends = set(params.get("stop_token_ids", ())) | (set() if params.get("ignore_eos", True) else EOS)
    assert not ends.intersection(answer.tokens[: params.get("min_tokens", 0)])
    for each in answer.logprobs:
        values = [value for _, value in each.top]
        assert len(values) <= params["logprobs"]
        assert values == sorted(values, reverse=True)
        assert -float("inf") < each.logprob <= 0.0
        assert all(value == each.logprob for token, value in each.top if token == each.token_id)
    if params.get("prompt_logprobs") is None:
        assert answer.prompt_logprobs is None
    else:
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        assert [each.token_id for each in answer.prompt_logprobs[1:] if each] == prompt[1:]


@settings(max_examples=30)
@given(requests(), st.sampled_from(SHAPES), st.sampled_from((3, 16, 128)))
def test_no_option_s_answer_depends_on_speculation_or_the_batch(
    drawn: list[tuple[list[int], int, dict[str, Any]]], shape: str, chunk: int
) -> None:
    """Tokens, log-probabilities and the end are exactly those of each request alone, decoded plainly."""
    alone = [_answers([each], spec=None, max_running_requests=1)[0] for each in drawn]
    for answer, (prompt, _, params) in zip(alone, drawn, strict=True):
        _check_answer(answer, prompt, params)
    spec = SpecConfig.parse(shape)
    assert _answers(drawn, spec=spec, chunked_prefill_size=chunk, page_size=4) == alone
    assert _answers(drawn, spec=None, chunked_prefill_size=chunk) == alone


@pytest.mark.parametrize("shape", [None, "3/4/8"])
def test_log_probabilities_survive_preemption(shape: str | None) -> None:
    """In a cache too small for all, requests restart and lose nothing."""
    params = {"logprobs": 2, "prompt_logprobs": 1, "temperature": 0.8, "frequency_penalty": 0.3}
    drawn = [
        (prompt_of(20 + row, row), 0, params | {"seed": row, "logit_bias": ((row, 2.0),)}) for row in range(6)
    ]
    alone = [_answers([each], spec=None)[0] for each in drawn]
    spec = SpecConfig.parse(shape) if shape else None
    engine = tiny_engine(
        spec=spec, max_draft_tokens=8, chunked_prefill_size=9,
        page_size=4, num_pages=34, max_model_len=64, max_running_requests=6,
    )  # fmt: skip
    assert _answers_of(engine, drawn) == alone
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("least", [3, 4, 5, 6])
def test_the_draft_knows_at_which_position_a_ban_ends(least: int) -> None:
    """A token that is banned up to a position, and all but certain from there on, is not drafted before."""
    spec = SpecConfig.parse("3/4/16")
    engine = tiny_engine(spec=spec)
    params = {"logit_bias": ((5, 100.0),), "stop_token_ids": (5,), "min_tokens": least, "temperature": 0.0}
    engine.add(request("r", prompt_of(9, 0), **params))
    engine.step()  # prefill: the first token; the tree's root
    worker, (entry,) = engine.worker, engine.scheduler.running
    with torch.inference_mode():
        cycle = draft_part(worker.models, worker.state, worker._batch([entry]), spec, worker.options)
    tree = cycle.tree
    has_it = tree.tokens[0] == 5
    assert not has_it[tree.depth[0] < least].any()  # depth d is the output's token d, counted from 0
    if least <= spec.num_steps:
        assert has_it[tree.depth[0] == least].any()
    rest = [token for output in drain(engine) for token in output.token_ids]
    assert rest.index(5) == len(rest) - 1 == least - 1
