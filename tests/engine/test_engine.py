"""The engine's promises: one final output a request, the same text under pressure, nothing lost."""

from __future__ import annotations

import random

import pytest
import torch

from nextn.config import SpecConfig
from nextn.engine.request import Request, SamplingParams
from nextn.engine.state import StepBatch
from nextn.engine.stats import Stats
from nextn.engine.step import plain_step, spec_step
from nextn.errors import ConfigError, RequestError
from tests.tiny import assert_idle, drain, poison_freed_pages, prompt_of, request, run, tiny_engine

SPEC = SpecConfig(2, 4, 4)


def _alone(each: Request) -> list[int]:
    """Tokens of a request run alone, without speculation."""
    engine = tiny_engine(spec=None, max_running_requests=1)
    return run(engine, [Request("alone", list(each.prompt_tokens), each.params)])["alone"]


def test_a_tiny_pool_preempts_and_every_text_is_that_of_the_request_alone() -> None:
    """Requests that are released and resumed continue as if nothing had happened."""
    requests = [
        request(str(r), prompt_of(5 + 3 * r, r), max_tokens=40, temperature=0.9, seed=r) for r in range(5)
    ]
    engine = tiny_engine(spec=SPEC, page_size=4, num_pages=26, max_model_len=80, chunked_prefill_size=8)
    texts = run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    for each in requests:
        assert texts[each.request_id] == _alone(each)


@pytest.mark.parametrize("spec", [SPEC, None])
def test_penalties_follow_each_node_s_own_path(spec: SpecConfig | None) -> None:
    """Frequency, presence and repetition penalties with and without speculation, alone and beside others."""
    penalties = [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.1, "temperature": 0.8},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "temperature": 1.0, "top_p": 0.9},
        {},
    ]
    requests = [
        request(str(r), prompt_of(6, r), **{"max_tokens": 40, "temperature": 0.0, "seed": r, **params})
        for r, params in enumerate(penalties)
    ]
    texts = run(tiny_engine(spec=spec), requests)
    for each in requests:
        assert texts[each.request_id] == _alone(each)
    assert texts["0"] != _alone(request("r", prompt_of(6, 0), max_tokens=40, temperature=0.0))


def test_filters_are_the_same_with_and_without_speculation() -> None:
    """top_k, top_p and min_p in one batch."""
    filters = [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}]
    requests = [
        request(str(r), prompt_of(6, r), max_tokens=50, temperature=1.2, seed=r, **params)
        for r, params in enumerate(filters)
    ]
    texts = run(tiny_engine(spec=SPEC), requests)
    for each in requests:
        assert texts[each.request_id] == _alone(each)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spec", [SPEC, None])
def test_a_storm_of_aborts_ends_every_request_once_and_loses_no_page(
    spec: SpecConfig | None, depth: int
) -> None:
    """Requests arrive and are aborted at random moments; survivors' texts are untouched."""
    draw = random.Random(3)
    engine = tiny_engine(spec=spec, page_size=4, num_pages=60, max_model_len=100, max_running_requests=4)
    engine.depth = depth
    poison_freed_pages(engine)
    requests = [
        request(
            str(r),
            prompt_of(draw.randrange(1, 30), r),
            max_tokens=draw.randrange(1, 30),
            temperature=0.5,
            seed=r,
        )
        for r in range(40)
    ]
    texts: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    waiting = list(requests)
    while waiting or engine.has_work():
        for _ in range(draw.randrange(3)):
            if waiting:
                texts[waiting[0].request_id] = []
                engine.add(waiting.pop(0))
        if texts and draw.random() < 0.3:
            engine.abort(draw.choice(list(texts)))
        for output in engine.step():
            assert output.request_id not in reasons
            texts[output.request_id] += output.token_ids
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
    assert set(reasons) == {each.request_id for each in requests}
    assert {"abort", "length"} == set(reasons.values())
    for each in requests:
        if reasons[each.request_id] == "length":
            assert texts[each.request_id] == _alone(each)
    assert_idle(engine)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_max_tokens_cuts_inside_a_run_of_accepted_tokens(max_tokens: int) -> None:
    """Exactly max_tokens come out, with reason length, whatever a cycle brings."""
    engine = tiny_engine(spec=SpecConfig(3, 4, 8))
    engine.add(request("r", prompt_of(8, 1), max_tokens=max_tokens, temperature=0.0))
    outputs = list(drain(engine))
    assert sum(len(output.token_ids) for output in outputs) == max_tokens == outputs[-1].completion_tokens
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].prompt_tokens == 8


def test_a_stop_token_inside_a_run_ends_the_request_there() -> None:
    """For every token that occurs in the text: generation stops at its first occurrence."""
    text = _alone(request("r", prompt_of(8, 1), max_tokens=40, temperature=0.0))
    for token in set(text):
        engine = tiny_engine(spec=SpecConfig(3, 4, 8))
        engine.add(request("r", prompt_of(8, 1), max_tokens=40, temperature=0.0, stop_token_ids=(token,)))
        outputs = list(drain(engine))
        got = [t for output in outputs for t in output.token_ids]
        assert got == text[: text.index(token) + 1]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", token)


def test_eos_stops_unless_ignored_and_wins_over_the_length_limit() -> None:
    """EOS as the last allowed token is a stop, not a length."""
    text = _alone(request("r", prompt_of(8, 1), max_tokens=40, temperature=0.0))
    eos = text[4]
    first = text.index(eos)
    engine = tiny_engine(spec=SPEC)
    engine.eos_token_ids = frozenset({eos})
    engine.add(Request("r", prompt_of(8, 1), SamplingParams(max_tokens=first + 1, temperature=0.0)))
    outputs = list(drain(engine))
    assert (outputs[-1].finish_reason, outputs[-1].completion_tokens) == ("stop", first + 1)
    again = tiny_engine(spec=SPEC)
    again.eos_token_ids = frozenset({eos})
    assert run(again, [request("r", prompt_of(8, 1), max_tokens=40, temperature=0.0)])["r"] == text


def test_a_request_that_cannot_run_is_refused_whole() -> None:
    """Too long, empty, foreign token ids, an id in use: an error with the field, and nothing is queued."""
    engine = tiny_engine(spec=SPEC, max_model_len=64)
    for prompt, params, field in [
        ([], {}, "prompt"),
        ([40], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2] * 64, {"max_tokens": 1}, "prompt"),
        ([2] * 60, {"max_tokens": 5}, "max_tokens"),
        ([2], {"max_tokens": 2, "stop": ("x",)}, "stop"),
    ]:
        with pytest.raises(RequestError) as error:
            engine.add(request("bad", prompt, **params))
        assert error.value.field == field
    engine.add(request("r", [2], max_tokens=2))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("r", [2], max_tokens=2))
    assert len(list(drain(engine))) == 2


def test_a_request_as_long_as_the_model_allows_is_served_to_its_last_token() -> None:
    """Prompt and output fill max_model_len exactly; the tree's scratch slots lie beyond it."""
    for prompt_length in (1, 40, 63):
        engine = tiny_engine(spec=SpecConfig(3, 4, 8), max_model_len=64, page_size=16, num_pages=5)
        each = request("r", prompt_of(prompt_length, 2), max_tokens=64 - prompt_length, temperature=0.0)
        assert run(engine, [each])["r"] == _alone(each)


def test_a_request_larger_than_the_cache_is_refused_with_the_figure() -> None:
    """At once, with the pages that it needs and those that are there; one that just fits is served."""
    engine = tiny_engine(spec=SPEC, max_model_len=64, page_size=4, num_pages=10)
    for check in (engine.validate, lambda prompt, params: engine.add(Request("r", prompt, params))):
        with pytest.raises(
            RequestError, match="need 11 cache pages of 4 tokens; this engine has 10"
        ) as error:
            check(prompt_of(30, 1), SamplingParams(max_tokens=7))
        assert error.value.field == "max_tokens"
    each = request("r", prompt_of(30, 1), max_tokens=6, temperature=0.0)
    assert run(engine, [each])["r"] == _alone(each)


def test_figures_add_up_while_requests_run_and_afterwards() -> None:
    """Steps, tokens and pages; used, cached and free pages are always all there are."""
    engine = tiny_engine(spec=SPEC, page_size=4, chunked_prefill_size=8, num_pages=100)
    for r in range(3):
        engine.add(request(str(r), prompt_of(17, 5), max_tokens=6, temperature=0.5, seed=r))
    most = 0.0
    while engine.has_work():
        engine.step()
        stats = engine.stats()
        most = max(most, stats["pages_used"])
        assert stats["pages_used"] + stats["pages_cached"] + stats["pages_free"] == stats["pages"] == 100
    assert 0 < most < 3 * 6
    assert (stats["finished"], stats["pages_used"], stats["generated_tokens"]) == (3, 0, 18)
    assert (stats["prompt_tokens"], stats["cached_tokens"]) == (17 + 2, 2 * 16)
    assert stats["prefill_steps"] == 3
    assert stats["decode_steps"] >= 3


def test_an_unseeded_request_draws_a_seed_of_its_own() -> None:
    """Two requests without a seed differ; two with the same seed do not."""
    engine = tiny_engine(spec=SPEC)
    params = {"max_tokens": 60, "temperature": 1.0}
    texts = run(engine, [request(str(r), prompt_of(5, 0), **params) for r in range(2)])
    assert texts["0"] != texts["1"]
    same = run(engine, [request(f"s{r}", prompt_of(5, 0), seed=7, **params) for r in range(2)])
    assert same["s0"] == same["s1"]


def test_freed_pages_are_never_read() -> None:
    """Pages full of NaN after every release change no text."""
    engine = tiny_engine(spec=SPEC, page_size=4, num_pages=40, max_model_len=60)
    poison_freed_pages(engine)
    requests = [
        request(str(r), prompt_of(4 + r, r), max_tokens=9 + 3 * r, temperature=0.6, seed=r) for r in range(9)
    ]
    texts = run(engine, requests)
    for each in requests:
        assert texts[each.request_id] == _alone(each)


@pytest.mark.parametrize("spec", [SPEC, None])
def test_padded_rows_are_inert(spec: SpecConfig | None) -> None:
    """A step over a live row and padding gives the live row what a step over it alone gives, bit for bit."""
    results = []
    for padding in (0, 3):
        engine = tiny_engine(spec=SPEC)
        engine.add(request("r", prompt_of(19, 4), max_tokens=60, temperature=0.7, seed=1))
        engine.step()
        worker, state = engine.worker, engine.worker.state
        entry = engine.scheduler.running[0]
        for buffer in (state.draft_state, state.ring_hidden, state.tail):
            buffer[state.scratch_row] = float("nan")
        rows = torch.tensor([entry.row] + [state.scratch_row] * padding)
        batch = StepBatch(rows, rows != state.scratch_row, pages=2, any_sampled=True)
        before = state.cache.clone()
        for _ in range(3):
            if spec is None:
                accepted = plain_step(worker.models, state, batch, worker.options)
            else:
                accepted = spec_step(worker.models, state, batch, spec, worker.options)
            results.append((accepted.tokens[0], accepted.length[0]))
        untouched = [page for page in range(128) if page not in entry.pages]
        assert torch.equal(state.cache[:, untouched].isnan(), before[:, untouched].isnan())
    for left, right in zip(results[:3], results[3:], strict=True):
        assert torch.equal(left[0], right[0])
        assert torch.equal(left[1], right[1])


def test_a_shape_that_was_not_reserved_is_refused() -> None:
    """set_spec names the limit; a plain engine says that it cannot draft."""
    engine = tiny_engine(spec=SPEC)
    with pytest.raises(ConfigError, match="above the 4 that this engine reserved"):
        engine.set_spec(SpecConfig(5, 8, 32))


@pytest.mark.parametrize(
    "room", [{}, {"max_model_len": 2}, {"num_pages": 1}], ids=["long", "short", "one page"]
)
def test_a_warm_up_leaves_nothing_behind(room: dict[str, int]) -> None:
    """No page, no count; and the engine goes on as if it were new."""
    engine = tiny_engine(**room)
    engine.warm_up()
    engine.check_integrity()
    assert engine.pool.free == engine.pool.num_pages
    assert engine.counters == Stats()
    assert not engine.has_work()
    prompt = prompt_of(1, 3)
    fresh = run(tiny_engine(**room), [request("a", prompt, max_tokens=1, temperature=0.0)])
    assert run(engine, [request("a", prompt, max_tokens=1, temperature=0.0)]) == fresh
