"""The draft's own proof: whatever the cycles did, its cache and logits are those of a fresh NextN prefill.

A wrong draft never shows in the text, because the target corrects it; only here and in the acceptance.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.scheduler import Running
from nextn.engine.state import RING
from nextn.engine.step import StepOptions
from nextn.models.inputs import PrefillInput
from tests.compare import assert_close
from tests.tiny import prompt_of, request, run, tiny_engine

SHAPES = ("1/1/2", "1/4/4", "2/4/4", "3/1/4", "3/4/8", "5/8/32")


def _fresh(
    engine: Engine, tokens: list[int], post_norm: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents of target and NextN over tokens[:-1], and the draft logits after tokens[-1], in one prefill."""
    models = engine.worker.models
    assert models.nextn is not None
    n = len(tokens) - 1
    ids = torch.tensor(tokens)
    cache = torch.full(
        (models.cfg.num_hidden_layers + 1, 1, n, models.cfg.latent_dim), float("nan"), dtype=torch.float64
    )

    def inputs(part: torch.Tensor) -> PrefillInput:
        steps = torch.arange(n)
        return PrefillInput(part, steps, steps, torch.zeros(1, 1, dtype=torch.int64), (0, n), (0,))

    hidden = models.target.prefill(inputs(ids[:-1]), cache).hidden
    states = models.target.final_norm(hidden) if post_norm else hidden
    output = models.nextn.prefill(inputs(ids[1:]), states, cache).hidden
    logits = models.target.logits(models.nextn.final_norm(output[-1]))
    return cache[:-1, 0], cache[-1, 0], logits


def check_caches(engine: Engine, entry: Running) -> None:
    """Compare what a live row has of its tokens, shared pages included, with a fresh prefill of them.

    The target's entries as far as the host knows them, the draft's as far as others may use them.
    """
    settled = min(engine.worker.settled_tokens(entry), entry.length)
    tokens = (entry.request.prompt_tokens + entry.request.output_tokens)[: entry.length + 1]
    count = min(entry.length, len(tokens) - 1)  # the token behind the last one may be in flight
    stream = engine._streams[entry.request.request_id]
    if stream.entry is not entry or count == 0:
        return  # its row is not prepared yet, or nothing is to be compared
    slots = torch.tensor([entry.pages[i // engine.pool.page_size] for i in range(count)])
    slots = slots * engine.pool.page_size + torch.arange(count) % engine.pool.page_size
    cached = engine.worker.state.cache.flatten(1, 2)[:, slots]
    target, draft, _ = _fresh(engine, tokens[: count + 1])
    assert_close(cached[:-1], target, "fp64", what="target latents")
    settled = min(settled, count)
    assert_close(cached[-1, :settled], draft[:settled], "fp64", what="NextN latents")


def _check_row(engine: Engine, entry: Running, post_norm: bool = True) -> None:
    """Compare one live row with a fresh prefill of its own tokens."""
    state, models = engine.worker.state, engine.worker.models
    assert models.nextn is not None
    tokens = entry.request.prompt_tokens + entry.request.output_tokens
    assert int(state.n[entry.row]) == len(tokens) - 1 == int(state.draft_len[entry.row])
    assert int(state.root[entry.row]) == tokens[-1]
    positions = torch.arange(len(tokens) - 1).unsqueeze(0)
    slots = state.slots(state.page_table[[entry.row]], positions)[0]
    cached = state.cache.flatten(1, 2)[:, slots]
    target, draft, logits = _fresh(engine, tokens, post_norm)
    assert_close(cached[:-1], target, "fp64", what="target latents")
    assert_close(cached[-1], draft, "fp64", what="NextN latents")
    seed = models.target.logits(models.nextn.final_norm(state.draft_state[entry.row]))
    assert_close(seed, logits, "fp64", what="draft logits")


def _start(engine: Engine, prompts: list[int], temperature: float) -> None:
    for row, length in enumerate(prompts):
        engine.add(
            request(str(row), prompt_of(length, row), max_tokens=400, temperature=temperature, seed=row)
        )
    while any(not entry.is_prefilled for entry in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_fifty_cycles_the_draft_equals_a_fresh_prefill(shape: str, temperature: float) -> None:
    """Prompts around a page's and a chunk's edge, several requests, deep and bushy trees."""
    engine = tiny_engine(spec=SpecConfig.parse(shape), chunked_prefill_size=10, page_size=16, num_pages=256)
    _start(engine, [1, 9, 10, 11, 33], temperature)
    for _ in range(50):
        engine.step()
    assert len(engine.scheduler.running) == 5
    for entry in engine.scheduler.running:
        _check_row(engine, entry)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_prefill_in_chunks_gives_the_draft_the_real_next_token(chunk: int) -> None:
    """At a chunk's edge NextN reads the next prompt token, so any chunk size gives the same cache."""
    engine = tiny_engine(spec=SpecConfig(2, 4, 4), chunked_prefill_size=chunk)
    _start(engine, [23], 0.0)
    _check_row(engine, engine.scheduler.running[0])


@pytest.mark.parametrize(("shape", "page"), list(zip(SHAPES, cycle((1, 4, 16)), strict=False)))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_a_cache_hit_the_draft_equals_a_fresh_prefill(
    shape: str, temperature: float, page: int
) -> None:
    """Behind a prompt's pages, behind an answer's, and behind a fork in the middle; then some cycles on."""
    engine = tiny_engine(spec=SpecConfig.parse(shape), chunked_prefill_size=10, page_size=page, num_pages=960)
    params = {"max_tokens": 25, "temperature": temperature}
    first = request("first", prompt_of(37, 1), seed=1, **params)
    run(engine, [first])
    told = first.prompt_tokens + first.output_tokens
    prompts = {"same": told[:37], "next": [*told, *prompt_of(5, 2)], "fork": [*told[:50], *prompt_of(9, 3)]}
    found = {"same": 36, "next": 61, "fork": 49 if told[50] != prompt_of(9, 3)[0] else 50}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, seed=2, **params | {"max_tokens": 99}))
    while engine.scheduler.waiting or not all(entry.is_prefilled for entry in engine.scheduler.running):
        engine.step()
    cached = {entry.request.request_id: entry.cached for entry in engine.scheduler.running}
    assert cached == {name: common // page * page for name, common in found.items()}
    for _ in range(3):
        for entry in engine.scheduler.running:
            _check_row(engine, entry)
        for _ in range(4):
            engine.step()


@pytest.mark.parametrize("plain_steps", [1, RING - 1, RING, RING + 1, 3 * RING + 5])
def test_the_draft_catches_up_after_plain_decoding(plain_steps: int) -> None:
    """Plain steps leave the draft behind; the first cycle after them finds it whole, and so is the text."""
    engine = tiny_engine(spec=SpecConfig(3, 2, 5), page_size=4, num_pages=512)
    _start(engine, [5, 18], 0.7)
    engine.step()
    engine.set_spec(None)
    for _ in range(plain_steps):
        engine.step()
    engine.set_spec(SpecConfig(2, 4, 4))
    engine.step()
    for entry in engine.scheduler.running:
        _check_row(engine, entry)


def test_the_shape_may_change_at_every_step_without_changing_the_text() -> None:
    """The shape is an argument of the step: any order of trees and plain steps gives the same tokens."""
    shapes = [
        SpecConfig(2, 4, 4),
        None,
        SpecConfig(5, 8, 32),
        SpecConfig(1, 1, 2),
        None,
        None,
        SpecConfig(3, 1, 4),
    ]
    requests = [
        request(str(r), prompt_of(7 + r, r), max_tokens=90, temperature=0.8, seed=r) for r in range(3)
    ]
    engine = tiny_engine(spec=SpecConfig(2, 4, 4), max_draft_tokens=32)
    for each in requests:
        engine.add(each)
    texts: dict[str, list[int]] = {each.request_id: [] for each in requests}
    step = 0
    while engine.has_work():
        engine.set_spec(shapes[step % len(shapes)])
        for output in engine.step():
            texts[output.request_id] += output.token_ids
        step += 1
    for r in range(3):
        plain = tiny_engine(spec=None)
        again = request("p", prompt_of(7 + r, r), max_tokens=90, temperature=0.8, seed=r)
        assert texts[str(r)] == run(plain, [again])["p"]


def test_pre_norm_states_reach_the_draft_when_asked_for() -> None:
    """`--draft-hidden pre-norm`: the draft reads the target's state before model.norm, in every path."""
    engine = tiny_engine(
        spec=SpecConfig(3, 2, 5), options=StepOptions(post_norm=False), chunked_prefill_size=4
    )
    _start(engine, [6, 13], 0.0)
    for _ in range(10):
        engine.step()
    engine.set_spec(None)
    for _ in range(5):
        engine.step()
    engine.set_spec(SpecConfig(3, 2, 5))
    engine.step()
    for entry in engine.scheduler.running:
        _check_row(engine, entry, post_norm=False)


def test_coupled_drafting_accepts_more_and_changes_no_token() -> None:
    """Ranking with the target's noise raises the acceptance at T = 1; the text stays."""
    lengths, texts = {}, {}
    for coupled in (True, False):
        engine = tiny_engine(spec=SpecConfig(2, 4, 4), coupled_drafting=coupled)
        requests = [
            request(str(r), prompt_of(6, r), max_tokens=80, temperature=1.0, seed=r) for r in range(8)
        ]
        texts[coupled] = run(engine, requests)
        lengths[coupled] = engine.counters.acceptance.length
    assert texts[True] == texts[False]
    assert lengths[True] > lengths[False]
