"""Options of a request: what is refused, with the field named, and what reaches outputs and completions."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest

from nextn import LLM, SamplingParams
from nextn.config import SpecConfig
from nextn.engine.pages import PagePool
from nextn.engine.prefix_cache import PageKeys, PrefixCache
from nextn.engine.scheduler import Chunk, Running
from nextn.engine.stats import Acceptance
from nextn.engine.worker import scored_positions
from nextn.errors import RequestError
from tests.tiny import prompt_of, request, tiny_engine

PROMPT = "import os\nimport sys\n\n\ndef main("


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((3, 100.1),)},
        {"logit_bias": ((3, math.nan),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1.5, 1.0),)},
        {"logit_bias": ((3, 1.0), (3, 2.0))},
        {"logit_bias": tuple((token, 1.0) for token in range(301))},
        {"logit_bias": [(3, 1.0)]},
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": 1.5},
        {"prompt_logprobs": 21},
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_field(params: dict[str, Any]) -> None:
    """Each value by itself; the field is the first one named."""
    with pytest.raises(RequestError) as refused:
        SamplingParams(**params)
    assert refused.value.field == next(iter(params))


def test_a_model_refuses_biases_beyond_its_vocabulary_and_too_many_bans() -> None:
    """What only an engine can know."""
    engine = tiny_engine()
    with pytest.raises(RequestError, match=r"token 40, outside 0\.\.39"):
        engine.add(request("r", [5], logit_bias=((40, 1.0),)))
    many = tuple(range(2, 35))
    with pytest.raises(RequestError, match="32 token ids"):
        engine.add(request("r", [5], min_tokens=1, stop_token_ids=many))
    engine.add(request("r", [5], min_tokens=0, stop_token_ids=many))
    engine.close()


@cache
def _demo() -> LLM:
    return LLM("demo", device="cpu", dtype="float64", max_model_len=256, num_pages=64, max_draft_tokens=8)


@pytest.mark.parametrize("shape", ["off", "3/4/8"])
def test_stop_strings_are_not_looked_for_before_min_tokens(shape: str) -> None:
    """One that ends earlier is text; the next one from there on ends the text, with enough tokens."""
    llm = _demo()
    llm.engine.set_spec(None if shape == "off" else SpecConfig.parse(shape))
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.0))[0]
    stop = next(c for c in whole.text if whole.text.count(c) > 3)
    for least in (0, 5, 10, 20):
        params = SamplingParams(max_tokens=40, temperature=0.0, stop=(stop,), min_tokens=least)
        got = llm.generate(PROMPT, params)[0]
        if got.finish_reason == "stop":
            assert len(got.token_ids) >= max(least, 1)
            assert whole.text.startswith(got.text + stop)
        assert got.token_ids == whole.token_ids[: len(got.token_ids)]


@pytest.mark.parametrize("shape", ["off", "3/4/8"])
def test_completions_carry_log_probabilities(shape: str) -> None:
    """Greedy and raw: the best is the chosen token; the prompt's are those of the same text generated."""
    llm = _demo()
    llm.engine.set_spec(None if shape == "off" else SpecConfig.parse(shape))
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, raw_logprobs=True, prompt_logprobs=0)
    first = llm.generate(PROMPT, params)[0]
    assert [each.top[0] for each in first.logprobs] == [(e.token_id, e.logprob) for e in first.logprobs]
    again = llm.generate([[*first.prompt_tokens, *first.token_ids]], params)[0]
    assert again.prompt_logprobs is not None
    echoed = again.prompt_logprobs[len(first.prompt_tokens) :]
    assert [each.token_id for each in echoed if each] == first.token_ids
    for each, generated in zip(echoed, first.logprobs, strict=True):
        assert each is not None
        assert each.logprob == pytest.approx(generated.logprob, abs=1e-5)


def _running(name: str, tokens: list[int], **params: Any) -> Running:
    """A request that has just started with nothing cached."""
    root = PrefixCache(PagePool(1, 4)).root
    return Running(request(name, prompt_of(10, 0), **params), 0, tokens, (0, 1), PageKeys(tokens, 4), root)


def test_a_restarted_request_rates_only_the_prompt_tokens_that_it_lacks() -> None:
    """From the first one without a log-probability to the prompt's last, whatever the chunks."""
    entry = _running("r", [*prompt_of(10, 0), 3, 4], prompt_logprobs=0)
    assert scored_positions(Chunk(entry, 0, 4, False)) == range(4)
    entry.request.prompt_logprobs = [None] * 6  # of tokens 0 .. 5
    assert list(scored_positions(Chunk(entry, 0, 4, False))) == []
    assert scored_positions(Chunk(entry, 4, 4, False)) == range(5, 8)
    assert scored_positions(Chunk(entry, 8, 4, True)) == range(8, 9)
    silent = _running("r", prompt_of(10, 0))
    assert list(scored_positions(Chunk(silent, 0, 10, True))) == []


def test_acceptance_by_position_counts_cycles_that_came_so_far() -> None:
    """Cycles of 1, 3, 3 and 2 tokens accepted drafts at depth 1 three times, at depth 2 twice."""
    acceptance = Acceptance()
    assert acceptance.accepted_by_position == []
    for emitted in (1, 3, 3, 2):
        acceptance.record(emitted, 3)
    assert acceptance.accepted_by_position == [3, 2]
    assert acceptance.by_depth() == [0.75, 0.5]
