"""Groups: requests with one prompt share its full pages, and each answers as if it were alone.

The scheduler's own side of it is in test_scheduler.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextn import LLM
from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.request import Output, Request, SamplingParams
from nextn.engine.scheduler import Prefix, Running
from nextn.engine.worker import Worker
from nextn.errors import RequestError
from tests.compare import assert_close
from tests.tiny import drain, prompt_of, tiny_engine

SPEC = SpecConfig(2, 4, 4)
DEEP = SpecConfig(4, 2, 6)


def _group(name: str, prompt: list[int], count: int, **params: Any) -> list[Request]:
    """Requests NAME.0, NAME.1, ... for the choices of one prompt."""
    shared = SamplingParams(**{"ignore_eos": True, "max_tokens": 12, "temperature": 0.9, "seed": 5, **params})
    return [
        Request(f"{name}.{choice}", list(prompt), shared, choice=choice, group=name)
        for choice in range(count)
    ]


@cache
def _alone(
    prompt: tuple[int, ...], params: SamplingParams, choice: int, spec: SpecConfig | None = None
) -> tuple[list[int], int]:
    """Tokens and decode cycles of one choice in an engine of its own."""
    engine = tiny_engine(spec=spec, max_running_requests=1)
    each = Request("alone", list(prompt), params, choice=choice)
    engine.add(each)
    tokens = [token for output in drain(engine) for token in output.token_ids]
    return tokens, each.acceptance.cycles


def _expected(each: Request) -> list[int]:
    return _alone(tuple(each.prompt_tokens), each.params, each.choice)[0]


def _tokens(outputs: Iterable[Output]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def _poison_freed_pages(engine: Engine) -> None:
    """Fill a page with NaN when its last holder gives it back: whoever still reads it shows."""
    release = engine.pool.release

    def poison(pages: Iterable[int]) -> None:
        for page in list(pages):
            release((page,))
            if engine.pool._references[page] == 0:
                engine.worker.state.cache[:, page] = float("nan")

    engine.pool.release = poison  # type: ignore[method-assign]


@dataclass
class _Watch:
    """Pages of prefixes as they were when they had just been filled."""

    engine: Engine
    bits: dict[Prefix, Tensor] = field(default_factory=dict)

    def check(self) -> None:
        """Every prefix that is filled and held has the bits that it had first."""
        state, alive = self.engine.worker.state, {}
        for prefix in self.engine.scheduler._sharing._prefixes.values():
            if prefix.holders[0].length >= prefix.tokens:
                now = state.cache[:, prefix.pages].clone()
                alive[prefix] = self.bits.get(prefix, now)
                assert torch.equal(now.view(torch.int64), alive[prefix].view(torch.int64))
        self.bits = alive


@dataclass(frozen=True)
class _Arrivals:
    """Requests by the step before which they come, and the steps before which some are aborted."""

    requests: list[tuple[int, Request]]
    aborts: dict[str, int]

    def drive(self, engine: Engine) -> list[Output]:
        """Run all to the end, with every check after every step."""
        watch, outputs, step = _Watch(engine), [], 0
        left = list(self.requests)
        while left or engine.has_work():
            for when, each in [item for item in left if item[0] <= step]:
                engine.add(each)
                left.remove((when, each))
            for name in [name for name, when in self.aborts.items() if when == step]:
                engine.abort(name)
                engine.check_integrity()
            outputs += engine.step()
            engine.check_integrity()
            watch.check()
            step += 1
            assert step < 3000, "no progress"
        assert engine.pool.free == engine.pool.num_pages
        return outputs


@st.composite
def _arrivals(draw: st.DrawFn) -> _Arrivals:
    """One to three groups whose members come apart, of prompts that end anywhere in a page."""
    requests, aborts = [], {}
    for index in range(draw(st.integers(1, 3))):
        prompt = prompt_of(draw(st.sampled_from((1, 3, 4, 5, 8, 9, 14, 17))), seed=index)
        members = _group(
            str(index), prompt, draw(st.integers(1, 4)),
            temperature=draw(st.sampled_from((0.0, 0.9))), max_tokens=draw(st.sampled_from((1, 7, 16))),
        )  # fmt: skip
        start = draw(st.integers(0, 4))
        for each in members:
            requests.append((start + draw(st.sampled_from((0, 0, 0, 1, 6))), each))
            if draw(st.integers(0, 3)) == 0:
                aborts[each.request_id] = start + draw(st.integers(1, 8))
    return _Arrivals(requests, aborts)


@settings(max_examples=30)
@given(
    _arrivals(),
    st.sampled_from((None, SPEC, DEEP)),
    st.sampled_from((1, 4)),
    st.integers(10, 24),
    st.sampled_from((3, 5, 64)),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_choice_answers_as_if_it_were_alone(
    arrivals: _Arrivals, spec: SpecConfig | None, page: int, pages: int, chunk: int, rows: int, ahead: bool
) -> None:
    """Tiny pools, chunks, aborts, preemption, running ahead: the tokens stay, pages add up, none is written
    twice, and what was freed is never read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "runs_ahead", ahead)
        engine = tiny_engine(
            spec=spec, max_draft_tokens=6, page_size=page, num_pages=pages * 4 // page, max_model_len=34,
            chunked_prefill_size=chunk, max_running_requests=rows,
        )  # fmt: skip
        _poison_freed_pages(engine)
        outputs = arrivals.drive(engine)
    tokens = _tokens(outputs)
    reasons = [(output.request_id, output.finish_reason) for output in outputs if output.finish_reason]
    assert sorted(name for name, _ in reasons) == sorted(each.request_id for _, each in arrivals.requests)
    aborted = {name for name, reason in reasons if reason == "abort"}
    for _, each in arrivals.requests:
        got, expected = tokens[each.request_id], _expected(each)
        assert got == (expected[: len(got)] if each.request_id in aborted else expected), each.request_id


@pytest.mark.parametrize("spec", [None, SPEC])
def test_preemption_in_a_group_changes_no_answer(spec: SpecConfig | None) -> None:
    """Members are released one by one and resumed on the pages that the others still hold."""
    requests = _group("g", prompt_of(21, 3), 5, max_tokens=30)
    engine = tiny_engine(spec=spec, page_size=4, num_pages=30, max_model_len=60, chunked_prefill_size=8)
    _poison_freed_pages(engine)
    started: Counter[str] = Counter()
    start_row, shared = engine.worker.start_row, []

    def note(entry: Running, *rest: Any) -> None:
        started[entry.request.request_id] += 1
        assert entry.prefix is not None
        shared.append((len(entry.prefix.holders) > 1, len(engine.scheduler.running) > 1))
        start_row(entry, *rest)

    engine.worker.start_row = note  # type: ignore[method-assign]
    tokens = _tokens(_Arrivals([(0, each) for each in requests], {}).drive(engine))
    assert engine.scheduler.num_preemptions > 0
    assert max(started.values()) > 1
    assert all(taken == possible for taken, possible in shared), "a member takes pages if another holds them"
    assert tokens == {each.request_id: _expected(each) for each in requests}


@pytest.mark.parametrize(
    ("length", "page", "cached"), [(21, 4, 20), (20, 4, 16), (5, 4, 4), (4, 4, 0), (9, 1, 8)]
)
@pytest.mark.parametrize("spec", [None, SPEC])
def test_followers_compute_only_what_lies_behind_the_shared_pages(
    length: int, page: int, cached: int, spec: SpecConfig | None
) -> None:
    """floor((length - 1) / page) pages are taken; usage and counters say so, with and without speculation."""
    engine = tiny_engine(spec=spec, page_size=page, num_pages=400)
    for each in _group("g", prompt_of(length, 1), 3):
        engine.add(each)
    outputs = list(drain(engine))
    by_request = {output.request_id: output.cached_tokens for output in outputs}
    assert by_request == {"g.0": 0, "g.1": cached, "g.2": cached}
    assert all(output.cached_tokens == by_request[output.request_id] for output in outputs)
    assert engine.counters.prompt_tokens == length + 2 * (length - cached)


def test_a_group_needs_only_the_pages_that_differ() -> None:
    """Four choices of a prompt of eight pages run side by side in a pool that holds two such prompts."""
    engine = tiny_engine(spec=SPEC, page_size=4, num_pages=23, max_model_len=60, max_running_requests=4)
    for each in _group("g", prompt_of(33, 1), 4, max_tokens=2):
        engine.add(each)
    engine.step()
    assert len(engine.scheduler.running) == 4
    # 37 slots are ten pages: eight are shared, two are each member's own.
    assert engine.pool.num_pages - engine.pool.free == 8 + 4 * 2
    list(drain(engine))


@pytest.mark.parametrize("ends", ["aborts half-way", "aborts after filling", "ends at its first token"])
def test_the_pages_outlive_the_member_that_filled_them(ends: str) -> None:
    """The next one goes on from where the first one was; nothing is computed twice."""
    engine = tiny_engine(spec=SPEC, page_size=4, chunked_prefill_size=10)
    _poison_freed_pages(engine)
    first, *others = _group("g", prompt_of(25, 2), 3)
    if ends == "ends at its first token":
        first.params = SamplingParams(**{**_fields(first.params), "max_tokens": 1})
    for each in (first, *others):
        engine.add(each)
    steps = {"aborts half-way": 2, "aborts after filling": 4, "ends at its first token": 3}[ends]
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort(first.request_id)
    engine.check_integrity()
    outputs += drain(engine)
    tokens = _tokens(outputs)
    for each in others:
        assert tokens[each.request_id] == _expected(each)
    cached = {output.request_id: output.cached_tokens for output in outputs if output.finish_reason}
    half = ends == "aborts half-way"
    assert [cached["g.1"], cached["g.2"]] == [20 if half else 24, 24]
    assert engine.counters.prompt_tokens == (25 + 1 if half else 25 + 1 + 1)


def test_a_member_that_comes_when_nobody_holds_pages_computes_them_itself() -> None:
    """A prefix ends with its last holder."""
    engine = tiny_engine(spec=SPEC, page_size=4)
    first, second = _group("g", prompt_of(25, 2), 2)
    engine.add(first)
    list(drain(engine))
    engine.add(second)
    outputs = list(drain(engine))
    assert _tokens(outputs)["g.1"] == _expected(second)
    assert outputs[-1].cached_tokens == 0


@pytest.mark.parametrize("spec", [SPEC, DEEP])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_followers_caches_and_draft_are_those_of_a_request_alone(
    spec: SpecConfig, temperature: float
) -> None:
    """A wrong draft entry would not change a token: so both caches, the draft's state and the cycles too."""
    requests = _group("g", prompt_of(22, 4), 3, temperature=temperature, max_tokens=40)
    engine = tiny_engine(spec=spec, page_size=4, chunked_prefill_size=64)
    for each in requests:
        engine.add(each)
    for _ in range(2 + 5):  # two prefills, five cycles
        engine.step()
    for entry in list(engine.scheduler.running):
        alone = tiny_engine(spec=spec, page_size=4, chunked_prefill_size=64)
        alone.add(Request("alone", entry.request.prompt_tokens, entry.request.params, entry.request.choice))
        for _ in range(1 + 5):
            alone.step()
        (other,) = alone.scheduler.running
        for got, want in zip(_row(engine, entry), _row(alone, other), strict=True):
            assert_close(got, want, "fp64")
    list(drain(engine))
    for each in requests:
        params = each.params
        assert each.acceptance.cycles == _alone(tuple(each.prompt_tokens), params, each.choice, spec)[1]


def _row(engine: Engine, entry: Running) -> tuple[Tensor, ...]:
    """Latents [layers + 1, n, C] of a row in order of position, its draft state, and its counters."""
    state, n = engine.worker.state, entry.length
    latents = state.cache[:, entry.pages].flatten(1, 2)[:, :n]
    assert int(state.n[entry.row]) == int(state.draft_len[entry.row]) == n
    return latents, state.draft_state[entry.row], state.root[entry.row]


def test_the_prompts_log_probabilities_are_whole_in_every_choice() -> None:
    """Chunks, and pages of another member that could have been taken, leave none of them out."""
    engine = tiny_engine(spec=SPEC, page_size=4, chunked_prefill_size=7)
    for each in _group("g", prompt_of(22, 4), 3, prompt_logprobs=2):
        engine.add(each)
    first = {}
    for output in drain(engine):
        first.setdefault(output.request_id, output)
    whole = [output.prompt_logprobs for output in first.values()]
    assert all(each is not None and len(each) == 22 and each[0] is None for each in whole)
    chosen = [[t.logprob for t in each or () if t is not None] for each in whole]
    assert chosen[1] == pytest.approx(chosen[0])
    assert chosen[2] == pytest.approx(chosen[0])


def test_choices_differ_under_one_seed_and_without_one() -> None:
    """One seed: `choice` separates the noise. None: each member draws a seed, which explains its answer."""
    prompt = prompt_of(9, 1)
    engine = tiny_engine(spec=SPEC)
    many = {"max_tokens": 60, "temperature": 1.5}
    requests = _group("seeded", prompt, 4, **many) + _group("free", prompt, 4, seed=None, **many)
    for each in requests:
        engine.add(each)
    seeds = {name: stream.seed for name, stream in engine._streams.items()}
    tokens = _tokens(drain(engine))
    assert len({tuple(answer) for answer in tokens.values()}) == 8
    for each in requests:
        params = SamplingParams(**{**_fields(each.params), "seed": seeds[each.request_id]})
        assert tokens[each.request_id] == _alone(tuple(prompt), params, each.choice)[0]


def test_the_text_is_that_of_each_choice_alone() -> None:
    """The same through a tokenizer, on the embedded model."""
    engine = LLM("demo", dtype="float64", page_size=16, max_running_requests=3).engine
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("The moon had set, and the road to the sea lay dark before them. " * 2)

    def texts(requests: list[Request]) -> list[str]:
        for each in requests:
            engine.add(each)
        written = dict.fromkeys((each.request_id for each in requests), "")
        for output in drain(engine):
            written[output.request_id] += output.text
        return list(written.values())

    together = texts(_group("g", prompt, 3))
    assert together == [text for each in _group("h", prompt, 3) for text in texts([each])]
    assert len(set(together)) == 3


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_a_group_with_two_prompts_is_refused() -> None:
    """The refusal names the field and keeps nothing; the group's name is free again when it has ended."""
    engine = tiny_engine(spec=SPEC)
    first, second = _group("g", prompt_of(9, 1), 2)
    second.prompt_tokens = prompt_of(9, 2)
    engine.add(first)
    with pytest.raises(RequestError, match="another prompt") as raised:
        engine.add(second)
    assert raised.value.field == "group"
    engine.check_integrity()
    list(drain(engine))
    engine.add(second)
    assert _tokens(drain(engine)) == {"g.1": _expected(second)}
