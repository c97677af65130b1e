"""The offline interface: prompts of every form, and nothing left open after an error."""

from __future__ import annotations

from typing import Any

import pytest

from nextn import LLM, SamplingParams
from nextn.errors import ConfigError, RequestError
from tests.tiny import prompt_of, tiny_engine

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def llm() -> LLM:
    """An LLM around the tiny random model, which has no tokenizer."""
    offline = LLM.__new__(LLM)
    offline.engine = tiny_engine()
    return offline


def test_one_prompt_and_several_are_told_apart(llm: LLM) -> None:
    """A list of ids is one prompt, a list of lists several, an empty list none."""
    one = llm.generate(prompt_of(5, 0), GREEDY)
    many = llm.generate([prompt_of(5, 0), prompt_of(7, 1)], GREEDY)
    assert [completion.token_ids for completion in many][:1] == [completion.token_ids for completion in one]
    assert len(many) == 2
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("prompts", [[[2, 3], 4], ["text"], [[]], [[2], [99]]])
def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(llm: LLM, prompts: Any) -> None:
    """Mixed ids and prompts, text without a tokenizer, an empty prompt, a foreign id."""
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work()


def test_after_a_failed_run_the_next_one_starts_clean(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the middle leaves no request open and no page held."""
    steps = iter([None, None, KeyboardInterrupt()])
    step = llm.engine.step

    def failing() -> Any:
        error = next(steps, None)
        if error is not None:
            raise error
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt_of(5, 0), prompt_of(9, 1)], SamplingParams(max_tokens=40, temperature=0.0))
    assert not llm.engine.has_work()
    assert llm.engine.pool.free == llm.engine.pool.num_pages
    llm.engine.check_integrity()
    assert len(llm.generate([prompt_of(5, 0)], GREEDY)[0].token_ids) == 6


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop": "ab"}, "stop"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"max_tokens": 3.5}, "max_tokens"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a",) * 17}, "stop"),
    ],
)
def test_sampling_parameters_of_the_wrong_kind_name_their_field(params: dict[str, Any], field: str) -> None:
    """A string is not taken for a sequence of stop strings, a fraction not for a count."""
    with pytest.raises(RequestError) as error:
        SamplingParams(**params)
    assert error.value.field == field


def test_a_tree_wider_than_the_vocabulary_is_refused_at_the_start() -> None:
    """Not at the first request."""
    from nextn.config import SpecConfig

    with pytest.raises(ConfigError, match="above the vocabulary of 40"):
        tiny_engine(spec=SpecConfig(1, 41, 4))
