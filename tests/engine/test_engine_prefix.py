"""The prefix cache through the engine: hits with and without speculation, and answers as if there were none.

The trie's own side of it is in test_prefix_cache.py, admission and deferral in test_scheduler.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from nextn import LLM
from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.request import Output, Request, SamplingParams
from nextn.engine.scheduler import Running
from tests.compare import assert_close
from tests.tiny import drain, poison_freed_pages, prompt_of, request, tiny_engine, tokens_of

SPEC = SpecConfig(2, 4, 4)
DEEP = SpecConfig(4, 2, 6)


def _choices(name: str, prompt: list[int], count: int, **params: Any) -> list[Request]:
    """Requests NAME.0, NAME.1, ... for the choices of one prompt."""
    shared = SamplingParams(**{"ignore_eos": True, "max_tokens": 12, "temperature": 0.9, "seed": 5, **params})
    return [Request(f"{name}.{choice}", list(prompt), shared, choice=choice) for choice in range(count)]


@cache
def _alone(
    prompt: tuple[int, ...], params: SamplingParams, choice: int, spec: SpecConfig | None = None
) -> tuple[list[int], int]:
    """Tokens and decode cycles of one choice in an engine of its own that caches nothing."""
    engine = tiny_engine(spec=spec, max_running_requests=1, prefix_cache=False)
    each = Request("alone", list(prompt), params, choice=choice)
    engine.add(each)
    tokens = [token for output in drain(engine) for token in output.token_ids]
    return tokens, each.acceptance.cycles


def _expected(each: Request) -> list[int]:
    return _alone(tuple(each.prompt_tokens), each.params, each.choice)[0]


def _serve(engine: Engine, *requests: Request) -> dict[str, int]:
    """Run requests together and check their answers; their cached tokens by id."""
    for each in requests:
        engine.add(each)
    outputs = list(drain(engine))
    tokens = tokens_of(outputs)
    for each in requests:
        assert tokens[each.request_id] == _expected(each), each.request_id
    return _cached(outputs)


def _cached(outputs: Iterable[Output]) -> dict[str, int]:
    """Cached tokens by request, the same in all of its outputs."""
    found: dict[str, set[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, set()).add(output.cached_tokens)
    assert all(len(values) == 1 for values in found.values())
    return {name: values.pop() for name, values in found.items()}


@pytest.mark.parametrize(
    ("length", "page", "cached"), [(21, 4, 20), (20, 4, 16), (5, 4, 4), (4, 4, 0), (9, 1, 8)]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
def test_choices_compute_only_what_lies_behind_the_shared_pages(
    length: int, page: int, cached: int, spec: SpecConfig | None, depth: int
) -> None:
    """floor((length - 1) / page) pages are taken; usage and counters say so, with and without speculation."""
    engine = tiny_engine(spec=spec, page_size=page, num_pages=400)
    engine.depth = depth
    usage = _serve(engine, *_choices("g", prompt_of(length, 1), 3))
    assert usage == {"g.0": 0, "g.1": cached, "g.2": cached}
    assert engine.counters.prompt_tokens == length + 2 * (length - cached)
    assert engine.counters.cached_tokens == 2 * cached
    assert _serve(engine, *_choices("h", prompt_of(length, 1), 1)) == {"h.0": cached}


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
@pytest.mark.parametrize("common", [3, 4, 5, 8, 9, 12, 13, 20])
def test_after_a_fork_the_page_that_holds_the_last_common_token_is_computed_again(
    common: int, spec: SpecConfig | None
) -> None:
    """The draft's entry of the last common token is a pair with the one behind it, which is another now."""
    engine = tiny_engine(spec=spec, page_size=4)
    stem = prompt_of(20, 1)
    fork = [*stem[:common], *((token - 1) % 30 + 5 for token in stem[common:]), 7, 8, 9]
    assert common == 20 or fork[common] != stem[common]
    _serve(engine, request("a", [*stem, 5], max_tokens=6, temperature=0.0))
    follows = request("b", fork, max_tokens=6, temperature=0.8, seed=1)
    assert _serve(engine, follows) == {"b": (common - 1) // 4 * 4}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_finds_the_answer_to_the_last_one(depth: int) -> None:
    """Pages of the output stay too; with speculation nothing of them is behind."""
    engine = tiny_engine(spec=SPEC, page_size=4, num_pages=200)
    engine.depth = depth
    first = request("a", prompt_of(11, 1), max_tokens=23, temperature=0.8, seed=3)
    _serve(engine, first)
    told = first.prompt_tokens + first.output_tokens
    second = request("b", [*told, *prompt_of(7, 2)], max_tokens=12, temperature=0.8, seed=4)
    assert _serve(engine, second) == {"b": (len(told) - 1) // 4 * 4}


@pytest.mark.parametrize("stop", range(1, 14))
def test_tokens_dropped_behind_a_stop_are_no_part_of_what_is_kept(stop: int) -> None:
    """A cycle that went on beyond the end left entries behind it; the next turn may differ there."""
    whole = _alone(tuple(prompt_of(8, 1)), SamplingParams(max_tokens=30, temperature=0.0), 0)[0]
    first = request("a", prompt_of(8, 1), max_tokens=30, temperature=0.0, stop_token_ids=(whole[stop],))
    engine = tiny_engine(spec=SpecConfig(3, 4, 8), page_size=1, num_pages=400)
    poison_freed_pages(engine)
    _serve(engine, first)
    told = first.prompt_tokens + first.output_tokens
    for tail in (whole[len(first.output_tokens) :][:5], prompt_of(5, 2)):
        second = request("b", [*told, *tail], max_tokens=10, temperature=0.0)
        assert _serve(engine, second)["b"] >= len(told) - 1


@pytest.mark.parametrize("plain_steps", [1, 5, 40])
def test_what_plain_decoding_left_without_a_draft_is_not_taken(plain_steps: int) -> None:
    """Its target entries are there, the draft's are not: cycles after a hit are those of a fresh prefill."""
    engine = tiny_engine(spec=None, max_draft_tokens=4, page_size=1, num_pages=400)
    first = request("a", prompt_of(9, 1), max_tokens=plain_steps, temperature=0.0)
    _serve(engine, first)
    engine.set_spec(SPEC)
    prompt = [*first.prompt_tokens, *first.output_tokens, 5]
    second = request("b", prompt, max_tokens=30, temperature=0.0)
    assert _serve(engine, second)["b"] >= 8
    assert second.acceptance.cycles == _alone(tuple(prompt), second.params, 0, SPEC)[1]


@pytest.mark.parametrize("spec", [None, SPEC], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_choice(spec: SpecConfig | None, depth: int) -> None:
    """Choices are released one by one and resumed on the pages that the others, or nobody, still hold."""
    requests = _choices("g", prompt_of(21, 3), 5, max_tokens=30)
    engine = tiny_engine(spec=spec, page_size=4, num_pages=30, max_model_len=60, chunked_prefill_size=8)
    engine.depth = depth
    poison_freed_pages(engine)
    started: Counter[str] = Counter()
    start_row = engine.worker.start_row

    def note(entry: Running, *rest: Any) -> None:
        started[entry.request.request_id] += 1
        start_row(entry, *rest)

    engine.worker.start_row = note  # type: ignore[method-assign]
    _serve(engine, *requests)
    assert engine.scheduler.num_preemptions > 0
    assert max(started.values()) > 1


def test_choices_need_only_the_pages_that_differ() -> None:
    """Four choices of a prompt of eight pages run side by side in a pool that holds two such prompts."""
    engine = tiny_engine(spec=SPEC, page_size=4, num_pages=23, max_model_len=60, max_running_requests=4)
    for each in _choices("g", prompt_of(33, 1), 4, max_tokens=2):
        engine.add(each)
    most, used = 0, 0.0
    while engine.has_work():
        engine.step()
        most = max(most, len(engine.scheduler.running))
        used = max(used, engine.stats()["pages_used"])
    assert most >= 3  # the first may have ended when the others start
    # 37 slots are ten pages: eight are shared, two are each choice's own.
    assert used <= 8 + 4 * 2


@pytest.mark.parametrize("ends", ["aborts half-way", "aborts after filling", "ends at its first token"])
def test_pages_outlive_the_request_that_filled_them(ends: str) -> None:
    """The next one goes on from where the first one was; nothing is computed twice."""
    engine = tiny_engine(spec=SPEC, page_size=4, chunked_prefill_size=10)
    poison_freed_pages(engine)
    first, *others = _choices("g", prompt_of(25, 2), 3)
    if ends == "ends at its first token":
        first = request("g.0", first.prompt_tokens, max_tokens=1)
    for each in (first, *others):
        engine.add(each)
    half = ends == "aborts half-way"
    outputs = [output for _ in range(1 if half else 4) for output in engine.step()]
    engine.abort(first.request_id)
    engine.check_integrity()
    outputs += drain(engine)
    tokens, cached = tokens_of(outputs), _cached(outputs)
    for each in others:
        assert tokens[each.request_id] == _expected(each)
    assert [cached["g.1"], cached["g.2"]] == [8 if half else 24, 24]


def test_another_salt_finds_nothing() -> None:
    """Requests of one salt share, those of another or of none do not."""
    engine = tiny_engine(spec=SPEC, page_size=4)

    def salted(name: str, salt: str | None) -> Request:
        each = request(name, prompt_of(21, 1), max_tokens=4, temperature=0.0)
        each.cache_salt = salt
        return each

    found = [_serve(engine, salted("r", salt))["r"] for salt in (None, "a", "b", "a", None, "", "b")]
    assert found == [0, 0, 0, 20, 20, 0, 20]


def test_without_the_cache_every_prompt_is_computed() -> None:
    """`--no-prefix-cache`: no hit, at the same time or later, and every page is free when nobody runs."""
    engine = tiny_engine(spec=SPEC, page_size=4, prefix_cache=False)
    poison_freed_pages(engine)
    assert set(_serve(engine, *_choices("g", prompt_of(25, 1), 3)).values()) == {0}
    assert set(_serve(engine, *_choices("h", prompt_of(25, 1), 2)).values()) == {0}
    assert engine.counters.prompt_tokens == 5 * 25
    assert engine.pool.free == engine.pool.num_pages


def test_cached_pages_give_way_to_requests() -> None:
    """Many different prompts in a small pool: all pages are cached after a while, none is in the way."""
    engine = tiny_engine(spec=SPEC, page_size=4, num_pages=30, max_model_len=60)
    poison_freed_pages(engine)
    for r in range(12):
        each = request(str(r), prompt_of(20 + r, r % 5), max_tokens=10, temperature=0.8, seed=r)
        _serve(engine, each)
    stats = engine.stats()
    assert stats["pages_cached"] > 15
    assert stats["preemptions"] == 0


@pytest.mark.parametrize("spec", [SPEC, DEEP], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_hit_s_caches_and_draft_are_those_of_a_request_alone(spec: SpecConfig, temperature: float) -> None:
    """A wrong draft entry would not change a token: so both caches, the draft's state and the cycles too."""
    engine = tiny_engine(spec=spec, page_size=4, chunked_prefill_size=64)
    requests = _choices("g", prompt_of(22, 4), 3, temperature=temperature, max_tokens=40)
    for each in requests:
        engine.add(each)
    while len(engine.scheduler.running) < 3 or engine.counters.decode_steps < 6:
        engine.step()
    for entry in list(engine.scheduler.running):
        alone = tiny_engine(spec=spec, page_size=4, prefix_cache=False)
        alone.add(Request("alone", entry.request.prompt_tokens, entry.request.params, entry.request.choice))
        while not alone.scheduler.running or alone.scheduler.running[0].length < entry.length:
            alone.step()
        (other,) = alone.scheduler.running
        for got, want in zip(_row(engine, entry), _row(alone, other), strict=True):
            assert_close(got, want, "fp64")
    list(drain(engine))
    for each in requests:
        assert each.acceptance.cycles == _alone(tuple(each.prompt_tokens), each.params, each.choice, spec)[1]


def _row(engine: Engine, entry: Running) -> tuple[Tensor, ...]:
    """Latents [layers + 1, n, C] of a row in order of position, its draft state, and its counters."""
    state, n = engine.worker.state, entry.length
    latents = state.cache[:, entry.pages].flatten(1, 2)[:, :n]
    assert int(state.n[entry.row]) == int(state.draft_len[entry.row]) == n
    return latents, state.draft_state[entry.row], state.root[entry.row]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_prompts_log_probabilities_are_whole_in_every_choice(depth: int) -> None:
    """Chunks, and pages of another request that could have been taken, leave none of them out."""
    engine = tiny_engine(spec=SPEC, page_size=4, chunked_prefill_size=7)
    engine.depth = depth
    for each in _choices("g", prompt_of(22, 4), 3, prompt_logprobs=2):
        engine.add(each)
    first: dict[str, Output] = {}
    for output in drain(engine):
        first.setdefault(output.request_id, output)
    whole = [output.prompt_logprobs for output in first.values()]
    assert all(each is not None and len(each) == 22 and each[0] is None for each in whole)
    chosen = [[t.logprob for t in each or () if t is not None] for each in whole]
    assert chosen[1] == pytest.approx(chosen[0])
    assert chosen[2] == pytest.approx(chosen[0])
    assert _serve(engine, *_choices("h", prompt_of(22, 4), 1)) == {"h.0": 20}


def test_choices_differ_under_one_seed_and_without_one() -> None:
    """One seed: `choice` separates the noise. None: each one draws a seed, which explains its answer."""
    prompt = prompt_of(9, 1)
    engine = tiny_engine(spec=SPEC)
    many = {"max_tokens": 60, "temperature": 1.5}
    requests = _choices("seeded", prompt, 4, **many) + _choices("free", prompt, 4, **many | {"seed": None})
    for each in requests:
        engine.add(each)
    seeds = {name: stream.seed for name, stream in engine._streams.items()}
    tokens = tokens_of(drain(engine))
    assert len({tuple(answer) for answer in tokens.values()}) == 8
    for each in requests:
        fields = {name: getattr(each.params, name) for name in SamplingParams.__dataclass_fields__}
        params = SamplingParams(**fields | {"seed": seeds[each.request_id]})
        assert tokens[each.request_id] == _alone(tuple(prompt), params, each.choice)[0]


def test_the_text_is_that_of_each_choice_alone() -> None:
    """The same through a tokenizer, on the embedded model."""
    prompt = "The moon had set, and the road to the sea lay dark before them. " * 2

    def texts(together: bool) -> list[str]:
        engine = LLM(
            "demo", dtype="float64", page_size=16, max_running_requests=3, prefix_cache=together
        ).engine
        assert engine.tokenizer is not None
        requests = _choices("g", engine.tokenizer.encode(prompt), 3)
        written = dict.fromkeys((each.request_id for each in requests), "")
        for batch in [requests] if together else [[each] for each in requests]:
            for each in batch:
                engine.add(each)
            for output in drain(engine):
                written[output.request_id] += output.text
        assert (engine.counters.cached_tokens > 0) == together
        return list(written.values())

    found = texts(together=True)
    assert found == texts(together=False)
    assert len(set(found)) == 3
