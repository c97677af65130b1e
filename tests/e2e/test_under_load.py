"""Random load on small engines: whatever comes and goes, each request is answered as if it were alone.

After every step pages add up, free ones are full of NaN, each request has ended at most once and said a
prefix of what it says alone; now and then both caches of every running row are compared with a fresh prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.grammar import Grammar
from nextn.engine.request import Output, Request, SamplingParams, TokenLogprobs
from tests.e2e.test_draft_state import check_caches
from tests.grammars import grammar_engine
from tests.tiny import assert_idle, poison_freed_pages, prompt_of

RESERVE = 8
SHAPES = (None, SpecConfig(2, 4, 4), SpecConfig(3, 4, 8), SpecConfig(1, 1, 2))
GRAMMARS = (
    Grammar("regex", "[ab]{2,5}(,[ab]{2,5}){0,3}"),
    Grammar("regex", "(.|\n)*"),
    Grammar("ebnf", 'root ::= "a" root "b" | "c" | "d" root'),
)
STEMS = [prompt_of(30, seed) for seed in range(2)]
"""What the prompts of a load may begin with."""


@dataclass
class Asked:
    """A request, and between which steps it comes and, perhaps, is aborted."""

    prompt: list[int]
    params: SamplingParams
    choice: int
    priority: int
    salt: str | None
    comes: int
    leaves: int | None

    def request(self, name: str) -> Request:
        return Request(
            name, list(self.prompt), self.params, self.choice, priority=self.priority, cache_salt=self.salt
        )

    @property
    def length(self) -> int:
        """Most tokens, prompt and output."""
        return len(self.prompt) + self.params.max_tokens


@dataclass
class Answer:
    """All that a client sees of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: tuple[Any, ...] | None = None

    def take(self, output: Output) -> None:
        assert self.finish is None, "an output came after the final one"
        assert output.prompt_logprobs is None or not self.tokens, "not the first output"
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.finish = (output.finish_reason, output.stop_reason, output.error)

    def begins(self, whole: Answer) -> bool:
        """Whether this is what `whole` begins with."""
        count = len(self.tokens)
        return (self.tokens, _values(self.logprobs)) == (
            whole.tokens[:count],
            _values(whole.logprobs[:count]),
        )


def _values(logprobs: list[TokenLogprobs]) -> Any:
    """To be compared: float32 may round either way what float64 computed in another order."""
    return [
        (each.token_id, pytest.approx(each.logprob, abs=1e-5), [token for token, _ in each.top])
        for each in logprobs
    ]


def _params(draw: Random) -> SamplingParams:
    """Any mix of options, each absent more often than not."""
    options: dict[str, Any] = {
        "temperature": draw.choice((0.0, 0.0, 0.8, 1.5)),
        "max_tokens": draw.choice((1, 2, 5, 9, 16, 24)),
        "seed": draw.randrange(2**40),
    }
    rare: dict[str, Any] = {
        "top_p": 0.8,
        "top_k": 5,
        "min_p": 0.05,
        "frequency_penalty": 0.6,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.2,
        "logit_bias": ((5, 3.0), (9, -100.0)),
        "stop_token_ids": (draw.randrange(40), draw.randrange(40)),
        "logprobs": draw.choice((0, 3)),
        "raw_logprobs": True,
        "prompt_logprobs": draw.choice((0, 2)),
        "ignore_eos": True,
    }
    options |= {name: value for name, value in rare.items() if draw.random() < 0.2}
    if draw.random() < 0.25:
        options |= {"grammar": draw.choice(GRAMMARS), "ignore_eos": False}
    return SamplingParams(**options)


def _requests(draw: Random) -> Iterator[Asked]:
    """Prompts that share beginnings, some of them whole, with several choices and many options."""
    for index in range(draw.randint(2, 5)):
        prompt = draw.choice(STEMS)[: draw.choice((0, 4, 9, 16, 30))] + prompt_of(draw.randint(1, 12), index)
        params, comes = _params(draw), draw.randint(0, 12)
        for choice in range(draw.choice((1, 1, 2, 3))):
            yield Asked(
                prompt,
                params,
                choice,
                priority=draw.choice((0, 0, 0, 1)),
                salt=draw.choice((None, None, None, "salt")),
                comes=comes + draw.choice((0, 0, 3)),
                leaves=comes + draw.randint(1, 15) if draw.random() < 0.2 else None,
            )


def _alone(each: Asked) -> Answer:
    """What the request says in an engine of its own, decoded plainly and without a cache."""
    engine = grammar_engine(spec=None, max_running_requests=1, prefix_cache=False)
    engine.add(each.request("alone"))
    answer = Answer()
    while engine.has_work():
        for output in engine.step():
            answer.take(output)
    return answer


def _engine(draw: Random, asked: list[Asked]) -> Engine:
    """Small in every respect; its pool holds the largest request and, mostly, not all of them."""
    page = draw.choice((1, 3, 4, 16))
    least = -(-(max(each.length for each in asked) + RESERVE) // page)
    engine = grammar_engine(
        spec=draw.choice(SHAPES),
        max_draft_tokens=RESERVE,
        page_size=page,
        num_pages=least + draw.choice((0, 1, 40 // page, 200 // page)),
        max_model_len=100,
        max_running_requests=draw.randint(1, 5),
        chunked_prefill_size=draw.choice((3, 8, 64)),
        prefix_cache=draw.random() < 0.85,
    )
    engine.depth = draw.choice((1, 2))
    poison_freed_pages(engine)
    return engine


def _drive(engine: Engine, asked: list[Asked], draw: Random, expected: list[Answer]) -> list[Answer]:
    """Run the load to its end, with every check after every step."""
    answers = [Answer() for _ in asked]
    step = 0
    while step <= max(each.comes for each in asked) or engine.has_work():
        for index, each in enumerate(asked):
            if each.comes == step:
                engine.add(each.request(str(index)))
            if each.leaves == step:
                engine.abort(str(index))
                engine.check_integrity()
        if draw.random() < 0.15:
            engine.set_spec(draw.choice(SHAPES))
        for output in engine.step():
            answer = answers[int(output.request_id)]
            answer.take(output)
            assert answer.begins(expected[int(output.request_id)]), output
        engine.check_integrity()
        if draw.random() < 0.1:
            for entry in engine.scheduler.running:
                check_caches(engine, entry)
        step += 1
        assert step < 1500, "no progress"
    assert_idle(engine)
    return answers


def _check(seed: int) -> None:
    """One load: aborts, stops, tiny pools, chunks, shared prefixes, choices, priorities, options, shapes."""
    draw = Random(seed)
    asked = list(_requests(draw))
    expected = [_alone(each) for each in asked]
    answers = _drive(_engine(draw, asked), asked, draw, expected)
    for each, answer, alone in zip(asked, answers, expected, strict=True):
        assert answer.finish is not None
        if answer.finish[0] == "abort":
            assert each.leaves is not None
        else:
            assert (answer.finish, len(answer.tokens)) == (alone.finish, len(alone.tokens))
            assert (answer.prompt_logprobs is None) == (alone.prompt_logprobs is None)
            rated = [each for each in answer.prompt_logprobs or () if each is not None]
            assert _values(rated) == _values([e for e in alone.prompt_logprobs or () if e is not None])


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_every_request_is_answered_as_if_it_were_alone(seed: int) -> None:
    """Whatever comes and goes beside it."""
    _check(seed)


@pytest.mark.full
@pytest.mark.parametrize("hundred", range(5))
def test_five_hundred_loads_are_answered_as_if_each_request_were_alone(hundred: int) -> None:
    """The same, for longer."""
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        _check(seed)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_oldest_request_goes_on_whatever_comes_after_it(depth: int) -> None:
    """In a pool that holds it and little more, with new requests at every step: it is never preempted."""
    engine = grammar_engine(
        spec=SHAPES[1], page_size=4, num_pages=20, max_model_len=70, chunked_prefill_size=8,
        max_running_requests=4,
    )  # fmt: skip
    engine.depth = depth
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    engine.add(Request("oldest", prompt_of(21, 0), params))
    steps = 0
    ended: set[str] = set()
    while "oldest" not in ended:
        if steps % 2:
            engine.add(Request(f"{steps}", prompt_of(9 + steps % 7, steps), params))
        ended |= {output.request_id for output in engine.step() if output.finish_reason}
        engine.check_integrity()
        running = [entry.request.request_id for entry in engine.scheduler.running]
        assert "oldest" in [*running, *ended]
        steps += 1
        assert steps < 60
    assert engine.scheduler.num_preemptions > 0
    engine.close()
    engine.step()
    assert_idle(engine)
