"""Structured output through the engine: texts follow their grammars, with speculation and without alike."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextn.config import SpecConfig
from nextn.engine.engine import Engine
from nextn.engine.grammar import Grammar, Grammars, Vocabulary
from nextn.engine.request import Request, SamplingParams
from nextn.engine.worker import Worker
from tests.grammars import BOUNDED, EOS, TOKENS, closed, grammar_engine, schema, spell
from tests.tiny import drain, prompt_of

jsonschema = pytest.importorskip("jsonschema")

GRAMMARS = (
    Grammar("json"),
    Grammar("regex", "[ab]{2,5}(,[ab]{2,5}){0,3}"),
    Grammar("regex", "(.|\n)*"),
    Grammar("ebnf", 'root ::= "a" root "b" | "c" | "d" root'),
    schema({"type": "array", "items": {"type": "integer", "minimum": -20, "maximum": 20}, "maxItems": 6}),
    schema(closed({"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, True, None]}}, ["a"])),
    Grammar(
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["a"],
                    "tags": [
                        {"type": "tag", "begin": "ab", "content": {"type": "any_text"}, "end": "}"},
                        {
                            "type": "tag",
                            "begin": "a",
                            "content": {"type": "regex", "pattern": "[01]*"},
                            "end": ",",
                        },
                    ],
                },
            }
        ),
    ),
)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from((0.0, 0.3, 1.0, 1.7)),
    "top_p": st.sampled_from((1.0, 0.5, 0.9)),
    "top_k": st.sampled_from((0, 1, 3, 12)),
    "min_p": st.sampled_from((0.0, 0.02, 0.3)),
    "frequency_penalty": st.sampled_from((0.0, 0.4, -0.6)),
    "repetition_penalty": st.sampled_from((1.0, 1.2, 0.7)),
    "logit_bias": st.dictionaries(st.integers(0, 39), st.sampled_from((-100.0, 3.0)), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    "stop_token_ids": st.lists(st.integers(0, 39), max_size=2, unique=True).map(tuple),
    "logprobs": st.sampled_from((None, 0, 3)),
    "raw_logprobs": st.booleans(),
    "max_tokens": st.sampled_from((1, 2, 9, 24)),
}
Drawn = tuple[list[int], dict[str, Any]]


@st.composite
def requests(draw: st.DrawFn) -> list[Drawn]:
    """Prompts and parameters of one to four requests; the first one has a grammar, others may."""
    found = []
    for row in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=len(OPTIONS)))
        params = {"max_tokens": 24} | {name: draw(OPTIONS[name]) for name in names}
        grammar = draw(st.sampled_from(GRAMMARS if row == 0 else (*GRAMMARS, None, None, None)))
        params |= {"seed": draw(st.integers(0, 2**40)), "grammar": grammar, "ignore_eos": grammar is None}
        found.append((prompt_of(draw(st.integers(1, 40)), row), params))
    return found


def _answers(engine: Engine, drawn: list[Drawn]) -> list[tuple[Any, ...]]:
    """Tokens, log-probabilities and end of each request, run together."""
    tokens: list[list[int]] = [[] for _ in drawn]
    logprobs: list[list[Any]] = [[] for _ in drawn]
    ends: list[Any] = [None] * len(drawn)
    for row, (prompt, params) in enumerate(drawn):
        engine.add(Request(str(row), prompt, SamplingParams(**params)))
    for output in drain(engine):
        row = int(output.request_id)
        tokens[row] += output.token_ids
        logprobs[row] += output.logprobs
        ends[row] = (output.finish_reason, output.stop_reason, output.error)
    return list(zip(tokens, logprobs, ends, strict=True))


@settings(max_examples=30)
@given(requests(), st.sampled_from(("1/4/4", "2/4/4", "3/1/4", "3/4/8", "5/8/32")), st.sampled_from((3, 128)))
def test_an_answer_within_a_grammar_does_not_depend_on_speculation_or_the_batch(
    drawn: list[Drawn], shape: str, chunk: int
) -> None:
    """Any options: exactly the tokens and log-probabilities of the request alone, decoded plainly."""
    alone = [_answers(grammar_engine(spec=None, max_running_requests=1), [each])[0] for each in drawn]
    for (tokens, logprobs, (reason, _, error)), (_, params) in zip(alone, drawn, strict=True):
        assert reason in ("stop", "length"), error
        assert len(tokens) <= params["max_tokens"]
        assert all(each.logprob > -math.inf for each in logprobs) or params.get("raw_logprobs")
    spec = SpecConfig.parse(shape)
    assert _answers(grammar_engine(spec=spec, chunked_prefill_size=chunk, page_size=4), drawn) == alone
    assert _answers(grammar_engine(spec=None, chunked_prefill_size=chunk), drawn) == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", [SpecConfig(3, 4, 8), None], ids=str)
def test_every_bounded_schema_is_finished_and_valid(spec: SpecConfig | None, temperature: float) -> None:
    """All of them, in batches of 16, from a model that knows no JSON: each ends by itself and validates."""
    engine = grammar_engine(spec=spec, max_draft_tokens=8, max_running_requests=16, num_pages=400)
    drawn = [
        (
            prompt_of(8, row),
            {"max_tokens": 400, "temperature": temperature, "seed": row, "grammar": schema(each)},
        )
        for row, each in enumerate(BOUNDED.values())
    ]
    for (name, each), (tokens, _, end) in zip(BOUNDED.items(), _answers(engine, drawn), strict=True):
        assert end[0] == "stop", (name, end, spell(tokens))
        assert tokens[-1] in EOS
        jsonschema.validate(json.loads(spell(tokens)), each)
    assert len(BOUNDED) >= 40


@pytest.mark.parametrize("shape", [None, "3/4/8"])
def test_a_preempted_request_goes_on_within_its_grammar(shape: str | None) -> None:
    """In a cache too small for all of them; what was said is taken up again."""
    drawn = [
        (prompt_of(20 + row, row), {
            "max_tokens": 24, "seed": row, "logprobs": 1, "grammar": Grammar("regex", "(.|\n){18,}"),
        })
        for row in range(7)
    ]  # fmt: skip
    alone = [_answers(grammar_engine(spec=None), [each])[0] for each in drawn]
    engine = grammar_engine(
        spec=SpecConfig.parse(shape) if shape else None, max_draft_tokens=8, chunked_prefill_size=9,
        page_size=4, num_pages=26, max_model_len=64, max_running_requests=6,
    )  # fmt: skip
    assert _answers(engine, drawn) == alone
    assert engine.scheduler.num_preemptions > 0


def test_answers_of_a_group_follow_one_grammar_apart() -> None:
    """Several choices share the prompt's pages; each has a place of its own in the grammar."""
    prompt, params = (
        prompt_of(21, 0),
        {"max_tokens": 30, "seed": 5, "grammar": GRAMMARS[1], "temperature": 1.5},
    )
    texts = []
    for spec in (None, SpecConfig(3, 4, 8)):
        engine = grammar_engine(spec=spec, max_draft_tokens=8, page_size=4, num_pages=400)
        for choice in range(4):
            engine.add(Request(str(choice), prompt, SamplingParams(**params), choice=choice))
        said: dict[str, list[int]] = {str(choice): [] for choice in range(4)}
        for output in drain(engine):
            said[output.request_id] += output.token_ids
        texts.append([spell(tokens) for tokens in said.values()])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert all(re.fullmatch("[ab]{2,5}(,[ab]{2,5}){0,3}", text) for text in texts[0])


def test_steps_do_not_run_ahead_while_a_grammar_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks need the tokens before them; once the last such request has ended, steps run ahead again."""
    monkeypatch.setattr(Worker, "runs_ahead", True)
    engine = grammar_engine(spec=SpecConfig(3, 4, 8), max_draft_tokens=8)
    ahead: list[tuple[bool, bool]] = []
    launch = engine.worker.launch

    def note(entries: Any, *args: Any, **kwargs: Any) -> Any:
        constrained = any(entry.request.params.grammar for entry in entries)
        ahead.append((constrained, any(entry.ahead for entry in entries)))
        return launch(entries, *args, **kwargs)

    monkeypatch.setattr(engine.worker, "launch", note)
    drawn: list[Drawn] = [
        (prompt_of(9, 0), {"max_tokens": 50, "seed": 1, "ignore_eos": True}),
        (prompt_of(9, 1), {"max_tokens": 40, "seed": 2, "grammar": GRAMMARS[1]}),
    ]
    assert _answers(engine, drawn) == [_answers(grammar_engine(spec=None), [each])[0] for each in drawn]
    assert (True, True) not in ahead
    assert {(True, False), (False, True)} <= set(ahead)


def test_a_grammar_that_no_token_can_go_on_with_ends_its_own_request_alone() -> None:
    """A vocabulary that cannot spell the text: an error that says so, whichever node met it first."""
    engine = grammar_engine(spec=SpecConfig(3, 4, 8), max_draft_tokens=8)
    lame = tuple(b"" if each == b"d" else each for each in TOKENS)
    engine.grammars = Grammars(lambda: Vocabulary(lame, EOS, lambda _text: []))
    drawn: list[Drawn] = [
        (prompt_of(9, 0), {"max_tokens": 9, "seed": 1, "grammar": Grammar("regex", "(ab|bc)(d|dd)")}),
        (prompt_of(9, 1), {"max_tokens": 9, "seed": 2, "ignore_eos": True}),
    ]
    broken, other = _answers(engine, drawn)
    assert spell(broken[0]) in ("ab", "bc")
    assert broken[2][0] == "error"
    assert "grammar allows no further token" in broken[2][2]
    assert other[2][0] == "length"


def test_masks_of_rows_without_a_grammar_allow_everything() -> None:
    """And those of the others follow the rows, not their order."""
    engine = grammar_engine(spec=None)
    for row, grammar in enumerate((None, Grammar("regex", "ab"), None)):
        params = SamplingParams(max_tokens=9, grammar=grammar, ignore_eos=grammar is None)
        engine.add(Request(str(row), prompt_of(5, row), params))
    engine.step()
    entries = engine.scheduler.running[::-1]
    trees = torch.tensor([[[0]] * 3, [[-1]] * 3])
    masks = engine.worker._node_masks(entries, trees)
    assert masks.shape == (3, 1, 2)
    assert masks[::2].tolist() == [[[-1, -1]]] * 2
    assert not torch.equal(masks[1, 0], masks[0, 0])
    engine.close()
