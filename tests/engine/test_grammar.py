"""Masks allow exactly what may follow, at every node of a tree; what cannot be enforced is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn import LLM, SamplingParams, demo
from nextn.config import SpecConfig
from nextn.engine import grammar as grammar_module
from nextn.engine.grammar import (
    MAX_CACHED,
    MAX_TEXT,
    Grammar,
    Grammars,
    Matcher,
    Vocabulary,
    mask_words,
    run_together,
)
from nextn.engine.request import Request
from nextn.errors import RequestError
from nextn.text import Tokenizer
from tests.grammars import EOS, GRAMMARS, TOKENS, VOCABULARY, closed, encode, grammar_engine, schema
from tests.tiny import drain, prompt_of, request, tiny_engine

VOCAB = len(TOKENS)
GARBAGE = 0x5A5A5A5A


def _bits(mask: torch.Tensor, vocab: int = VOCAB) -> set[int]:
    words = mask.tolist()
    return {token for token in range(vocab) if words[token // 32] >> (token % 32) & 1}


def _mask(matcher: Matcher, vocab: int = VOCAB) -> set[int]:
    out = torch.full((1, mask_words(vocab)), GARBAGE, dtype=torch.int32)
    matcher.fill((0,), (-1,), out)
    return _bits(out[0], vocab)


def _at(grammar: Grammar, tokens: Sequence[int]) -> Matcher:
    matcher = GRAMMARS.compile(grammar).matcher()
    matcher.advance(tokens)
    return matcher


Bounded = tuple[str, int]
"""A regular expression and the length of its longest text."""


def _joined(pair: tuple[Bounded, Bounded]) -> Bounded:
    return pair[0][0] + pair[1][0], pair[0][1] + pair[1][1]


def _either(pair: tuple[Bounded, Bounded]) -> Bounded:
    return f"({pair[0][0]}|{pair[1][0]})", max(pair[0][1], pair[1][1])


bounded = st.recursive(
    st.sampled_from((("a", 1), ("b", 1), ("c", 1), ("ab", 2), ("[bc]", 1), ("bc?", 2))),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(_joined),
        st.tuples(inner, inner).map(_either),
        inner.map(lambda each: (f"({each[0]})?", each[1])),
        inner.map(lambda each: (f"({each[0]}){{1,2}}", 2 * each[1])),
    ),
    max_leaves=4,
).filter(lambda each: each[1] <= 6)


@cache
def _language(pattern: str, longest: int) -> frozenset[str]:
    """All texts of a bounded expression over a, b and c."""
    whole = re.compile(pattern)
    texts = ("".join(each) for n in range(longest + 1) for each in itertools.product("abc", repeat=n))
    return frozenset(text for text in texts if whole.fullmatch(text))


@given(bounded, st.data())
def test_a_mask_allows_exactly_what_a_text_of_the_grammar_may_go_on_with(
    expression: Bounded, data: st.DataObject
) -> None:
    """Against the language written out; a forced text is taken in the tokenizer's own split."""
    grammar, texts = Grammar("regex", expression[0]), _language(*expression)
    said: list[int] = []
    while True:
        before = b"".join(TOKENS[token] for token in said).decode()
        allowed = _mask(_at(grammar, said))
        rests = {text[len(before) :] for text in texts if text.startswith(before)}
        expected = {
            t for t, each in enumerate(TOKENS) if each and any(r.startswith(each.decode()) for r in rests)
        } | (EOS if "" in rests else set())
        forced = len({rest[:1] for rest in rests}) == 1 and "" not in rests
        assert allowed
        assert allowed <= expected if forced else allowed == expected
        follow = sorted(allowed - EOS)
        if not follow:
            return
        said.append(data.draw(st.sampled_from(follow)))


GRAMMAR_KINDS = (
    Grammar("json"),
    Grammar("regex", "(ab|bc){1,5}d?"),
    Grammar("ebnf", 'root ::= "a" root "b" | "c"'),
    Grammar("ebnf", 'start: "a" start "b" | "c"'),
    schema(closed({"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, True, None]}}, ["a"])),
    schema({"type": "array", "items": {"type": "integer"}, "maxItems": 4}),
)


@given(st.sampled_from(GRAMMAR_KINDS), st.data())
def test_a_node_s_mask_is_that_of_the_text_before_it(grammar: Grammar, data: st.DataObject) -> None:
    """Random trees, forbidden drafts and EOS among them; the matcher stands afterwards where it stood."""
    said: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        follow = sorted(_mask(_at(grammar, said)) - EOS)
        if not follow:
            break
        said.append(data.draw(st.sampled_from(follow)))
    matcher = _at(grammar, said)
    before = _mask(matcher)
    tokens, parents, paths = [said[-1] if said else 0], [-1], [()]
    for node in range(1, data.draw(st.integers(1, 12))):
        parent = data.draw(st.integers(0, node - 1))
        after = sorted(_mask(_at(grammar, [*said, *paths[parent]]))) if paths[parent] is not None else []
        token = data.draw(
            st.sampled_from(after) if after and data.draw(st.booleans()) else st.integers(0, VOCAB - 1)
        )
        legal = token in after and token not in EOS
        paths.append((*paths[parent], token) if legal else None)
        tokens.append(token)
        parents.append(parent)
    out = torch.full((len(tokens), mask_words(VOCAB)), GARBAGE, dtype=torch.int32)
    matcher.fill(tokens, parents, out)
    for path, mask in zip(paths, out, strict=True):
        if path is None:
            assert set(mask.tolist()) == {GARBAGE}
        else:
            assert _bits(mask) == _mask(_at(grammar, [*said, *path]))
    assert _mask(matcher) == before
    assert matcher.error is None


def test_a_complete_text_allows_eos_alone_and_an_unfinished_one_not() -> None:
    """Every EOS id of the model."""
    grammar = Grammar("regex", "ab")
    assert not _mask(_at(grammar, [])) & EOS
    assert _mask(_at(grammar, encode("ab"))) == EOS


HOSTILE: dict[str, Grammar] = {
    "no JSON": Grammar("json_schema", "{"),
    "no object": Grammar("json_schema", "[1]"),
    "a number": Grammar("json_schema", "3"),
    "NaN": Grammar("json_schema", '{"const": NaN}'),
    "overflow": Grammar("json_schema", '{"type": "number", "maximum": 1e999}'),
    "huge integer": Grammar("json_schema", '{"type": "integer", "maximum": 1' + "0" * 400 + "}"),
    "too many digits": Grammar("json_schema", '{"maximum": 1' + "0" * 5000 + "}"),
    "lone surrogate": Grammar("json_schema", '{"const": "\\ud800"}'),
    "unknown type": schema({"type": "text"}),
    "properties no object": schema({"type": "object", "properties": [1]}),
    "deep": Grammar("json_schema", '{"items":' * 65 + "{}" + "}" * 65),
    "very deep": Grammar("json_schema", '{"a":' * 9000 + "1" + "}" * 9000),
    "long": Grammar("json_schema", '{"description": "' + "a" * MAX_TEXT + '"}'),
    "own reference": schema({"$ref": "#"}),
    "circle": schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
    "dangling": schema({"$ref": "#/$defs/a"}),
    "remote": schema({"$ref": "http://127.0.0.1:9/schema"}),
    "empty range": schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "false": schema({"allOf": [False]}),
    "not": schema({"not": {"type": "string"}}),
    "if": schema({"if": {"type": "string"}, "then": {"minLength": 2}}),
    "uniqueItems": schema({"type": "array", "uniqueItems": True}),
    "oneOf that overlaps": schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}),
    "lenient is not the client's": schema({"uniqueItems": True, "x-guidance": {"lenient": True}}),
    "unknown format": schema({"type": "string", "format": "shoe-size"}),
    "bad pattern": schema({"type": "string", "pattern": "(["}),
    "lookahead": schema({"type": "string", "pattern": "^(?=a)b$"}),
    "back reference": schema({"type": "string", "pattern": "^(a)\\1$"}),
    "bad expression": Grammar("regex", "(["),
    "deep expression": Grammar("regex", "(" * 30000 + "a" + ")" * 30000),
    "matches nothing": Grammar("regex", "[^\\s\\S]"),
    "no rules": Grammar("ebnf", ""),
    "undefined rule": Grammar("ebnf", "root ::= foo"),
    "unclosed rule": Grammar("ebnf", "root ::= ("),
    "endless rule": Grammar("ebnf", "root ::= root"),
    "deep rule": Grammar("ebnf", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    "surrogate in an expression": Grammar("regex", "\ud800"),
    "surrogate in rules": Grammar("ebnf", 'root ::= "\ud800"'),
    "no tag": Grammar("structural_tag", "[]"),
    "unknown tag": Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "loop"}}'),
    "no format": Grammar("structural_tag", '{"type": "structural_tag"}'),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_enforced_is_refused_with_the_field_and_a_reason(name: str) -> None:
    """No crash, no hang, one line of reason; a second try costs nothing."""
    started = time.perf_counter()
    for _ in range(2):
        with pytest.raises(RequestError) as refused:
            GRAMMARS.compile(HOSTILE[name])
        assert refused.value.field == "grammar"
        assert 20 < len(str(refused.value)) < 400
        assert "\n" not in str(refused.value)
    assert time.perf_counter() - started < 20.0


EXPENSIVE: dict[str, Grammar] = {
    "nested repeats": Grammar("regex", "((a{0,1000}){0,1000}){0,1000}"),
    "a product": Grammar("regex", "(a{1000}){1000}"),
    "many states": Grammar("regex", "(.*a.{300})+"),
    "long list": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "long string": schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "doubling": schema({
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)} | {"a25": {}},
    }),
    "choices of choices": schema({
        "allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(12)]
    }),
    "many values": schema({"enum": [f"a{i}" for i in range(6000)]}),
    "ambiguous": Grammar("ebnf", 'root ::= a a a a a a\na ::= "" | "a" a | a "a" | a a'),
    "many rules": Grammar("ebnf", "root ::= " + " | ".join(f'"a{i}"' for i in range(6000))),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_costs_much_is_bounded(name: str) -> None:
    """Compiled or refused, it takes neither long nor much; so do the masks along some text."""
    started = time.perf_counter()
    try:
        matcher = GRAMMARS.compile(EXPENSIVE[name]).matcher()
    except RequestError:
        pass
    else:
        for _ in range(6):
            follow = sorted(_mask(matcher) - EOS)
            if not follow:
                break
            matcher.advance([*matcher._taken, follow[len(matcher._taken) % len(follow)]])
    assert time.perf_counter() - started < 20.0


def test_a_draft_that_is_too_complex_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose mask fails gets zeros; its siblings and the request's own state are as before."""
    grammar = Grammar("regex", "(ab|bc){1,5}d?")
    matcher, twin = _at(grammar, encode("ab")), _at(grammar, encode("ab"))
    compute = Matcher._compute

    def fail(self: Matcher, path: tuple[int, ...], out: torch.Tensor) -> str | None:
        if path == tuple(encode("bc")):
            self._move(path).consume_token(0)  # an error from which the library does not come back
        return compute(self, path, out)

    monkeypatch.setattr(Matcher, "_compute", fail)
    (ab,), (bc,) = encode("ab"), encode("bc")
    out = torch.full((4, mask_words(VOCAB)), GARBAGE, dtype=torch.int32)
    matcher.fill((0, bc, bc, ab), (-1, 0, 1, 0), out)
    assert not out[1].any()
    assert set(out[2].tolist()) == {GARBAGE}
    twin.advance(encode("abab"))
    assert _bits(out[3]) == _mask(twin)
    assert matcher.error is None
    assert _mask(matcher) == _bits(out[0])


def test_what_all_requests_together_used_up_ends_none_of_them() -> None:
    """The library's state of a grammar has a limit: once it fails, the matcher goes on with a new one."""
    matcher = _at(Grammar("regex", "(ab|bc){1,6}d?"), encode("ab"))
    expected = _mask(matcher)
    matcher._inner.consume_token(0)
    assert matcher._inner.is_error()
    assert _mask(matcher) == expected
    matcher._inner.consume_token(0)
    matcher.advance(encode("abbc"))
    assert matcher.error is None
    assert _mask(matcher)


@pytest.mark.parametrize(("limit", "value"), [("max_lexer_states", 60), ("step_lexer_fuel", 200)])
def test_a_limit_that_others_hit_takes_no_token_from_a_mask(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with one costly grammar share what they find out: each mask is whole, or the request ends."""
    grammar = schema(closed({"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, True, None]}}, ["a"]))
    unlimited = GRAMMARS.compile(grammar)
    monkeypatch.setitem(grammar_module.LIMITS, limit, value)
    compiled = Grammars(lambda: VOCABULARY).compile(grammar)
    compiled._shared = True
    draw = random.Random(0)
    for _ in range(30):
        compiled._prototype = compiled._make()
        pairs = [(compiled.matcher(), unlimited.matcher(), list[int]()) for _ in range(3)]
        for _ in range(45):
            matcher, twin, taken = draw.choice(pairs)
            allowed, expected = _mask(matcher), _mask(twin)
            assert allowed == (set() if matcher.error else expected)
            if more := sorted(expected - EOS):
                taken.append(draw.choice(more))
                matcher.advance(taken)
                twin.advance(taken)


def test_masks_made_side_by_side_are_those_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads each request has a matcher of its own, whose errors stay its own."""
    texts = ("", "ab", "abbc", "abcdef", "abab")

    def masks() -> list[set[int]]:
        grammars = Grammars(lambda: VOCABULARY)
        compiled = grammars.compile(Grammar("regex", "(ab|bc){0,6}d?"))
        matchers = [compiled.matcher() for _ in texts]
        out = torch.zeros(len(texts), 1, mask_words(VOCAB), dtype=torch.int32)
        for matcher, text in zip(matchers, texts, strict=True):
            matcher.advance(encode(text))
        run_together([partial(m.fill, (0,), (-1,), o) for m, o in zip(matchers, out, strict=True)])
        assert [matcher.error is None for matcher in matchers] == [text != "abcdef" for text in texts]
        return [_bits(each[0]) for each in out]

    one_by_one = masks()
    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(grammar_module, "_MASKERS", pool)
        assert masks() == one_by_one
    assert [len(each) for each in one_by_one][3] == 0


def test_compiled_grammars_are_kept_and_their_number_is_bounded() -> None:
    """The same object for the same text; the one used least recently goes."""
    grammars = Grammars(lambda: VOCABULARY)
    first = grammars.compile(Grammar("regex", "a"))
    assert grammars.compile(Grammar("regex", "a")) is first
    for i in range(MAX_CACHED):
        grammars.compile(Grammar("regex", f"a{{1,{i + 2}}}"))
    assert len(grammars._cache) == MAX_CACHED
    assert grammars.compile(Grammar("regex", "a")) is not first


def test_any_thread_may_compile() -> None:
    """Many at once, the vocabulary is still made once."""
    made: list[int] = []

    def vocabulary() -> Vocabulary:
        made.append(1)
        time.sleep(0.05)
        return VOCABULARY

    grammars, found = Grammars(vocabulary), []
    threads = [
        threading.Thread(
            target=lambda i=i: found.append(grammars.compile(Grammar("regex", f"a{{1,{1 + i % 3}}}")))
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 3
    assert len(made) == 1


@pytest.mark.parametrize("name", ["own reference", "endless rule"])
def test_rules_without_an_end_are_refused_in_words_that_a_client_understands(name: str) -> None:
    with pytest.raises(RequestError, match="refer to themselves"):
        GRAMMARS.compile(HOSTILE[name])


def test_what_validate_has_compiled_is_not_compiled_again_when_the_request_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have left the cache meanwhile, and the engine's thread cannot wait for the compiler."""
    engine = grammar_engine()
    params = SamplingParams(max_tokens=9, temperature=0.0, grammar=Grammar("regex", "[ab]{3}"))
    compiled = engine.validate([1, 2], params)
    assert compiled is not None

    def refuse(_: Grammar) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(engine, "grammars", SimpleNamespace(compile=refuse))
    engine.add(Request("a", [1, 2], params, compiled=compiled))
    (output,) = [each for each in drain(engine) if each.finish_reason]
    assert output.finish_reason == "stop"


def test_a_grammar_that_takes_too_long_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request does not wait for the work, which goes on and serves the next try."""
    released = threading.Event()

    def vocabulary() -> Vocabulary:
        released.wait(10.0)
        return VOCABULARY

    grammars = Grammars(vocabulary)
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.05)
    with pytest.raises(RequestError, match="took more than"):
        grammars.compile(Grammar("regex", "a"))
    released.set()
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 10.0)
    assert _mask(grammars.compile(Grammar("regex", "a")).matcher())


def test_without_the_library_a_grammar_is_refused_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = grammar_engine()
    with pytest.raises(RequestError, match="pip install llguidance") as refused:
        engine.validate([5], SamplingParams(grammar=Grammar("json")))
    assert refused.value.field == "grammar"
    engine.validate([5], SamplingParams())


@pytest.mark.parametrize(
    ("params", "field"),
    [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 3}, "min_tokens"), ({}, "grammar")],
)
def test_options_that_contradict_a_grammar_are_refused(params: dict[str, Any], field: str) -> None:
    """EOS ends what a grammar describes; without a tokenizer there is no text to constrain."""
    engine = grammar_engine() if params else tiny_engine()
    with pytest.raises(RequestError) as refused:
        engine.add(
            request("r", prompt_of(4, 0), **{"ignore_eos": False, "grammar": Grammar("json"), **params})
        )
    assert refused.value.field == field
    assert not engine.has_work()


def _tag(form: dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


CALL = {
    "type": "tag", "begin": "<a>", "end": "</a>",
    "content": {"type": "json_schema", "json_schema": closed({"n": {"type": "integer", "maximum": 9}})},
}  # fmt: skip
OTHER = {"type": "tag", "begin": "<b>", "content": {"type": "regex", "pattern": "[xy]+"}, "end": ""}
MANY = {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ";", "at_least_one": True}
THOUGHT = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</t>"}
MAYBE_THOUGHT = {"type": "optional", "content": THOUGHT | {"begin": "<t>"}}
RULES = OTHER | {"content": {"type": "grammar", "grammar": 'root ::= "p" root | "q"'}}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a"], "tags": [CALL]}
TAGS: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "tag": (_tag(CALL), ['<a>{"n":1}</a>'], ['{"n":1}', '<a>{"n":10}</a>', "<a></a>"]),
    "const": (_tag({"type": "const_string", "value": 'a"\\\n'}), ['a"\\\n'], ["a", "b"]),
    "many": (
        _tag(MANY),
        ["<b>xy", '<a>{"n":1}</a>;<b>x;<a>{"n":2}</a>'],
        ["", "<b>x;", '<a>{"n":1}</a><b>x'],
    ),
    "one": (_tag(MANY | {"stop_after_first": True}), ["<b>xy"], ["<b>x;<b>x"]),
    "none": (_tag(MANY | {"at_least_one": False}), ["", "<b>xy"], ["x"]),
    "thought": (
        _tag({"type": "sequence", "elements": [THOUGHT, {"type": "regex", "pattern": "\\n{0,2}"}, CALL]}),
        ['</t><a>{"n":1}</a>', 'a <a> b</t>\n\n<a>{"n":1}</a>'],
        ['<a>{"n":1}</a>', "a</t>\n\n\n<a>"],
    ),
    "optional": (
        _tag({"type": "sequence", "elements": [MAYBE_THOUGHT, OTHER]}),
        ["<b>x", "<t>what?</t><b>x"],
        ["what?</t><b>x"],
    ),
    "or": (_tag({"type": "or", "elements": [CALL, OTHER]}), ["<b>x", '<a>{"n":1}</a>'], ["<c>"]),
    "triggered": (
        _tag(TRIGGERED),
        ["", "free <b text", 'so: <a>{"n":1}</a>', '<a>{"n":1}</a> and <a>{"n":2}</a> then'],
        ["so: <a>{n", "<a x"],
    ),
    "triggered once": (
        _tag(TRIGGERED | {"stop_after_first": True}),
        ["free", 'so: <a>{"n":1}</a>'],
        ['<a>{"n":1}</a> ', "<ab"],
    ),
    "triggered at least once": (_tag(TRIGGERED | {"at_least_one": True}), ['x<a>{"n":1}</a> y'], ["x"]),
    "rules": (_tag(RULES), ["<b>ppq"], ["<b>p"]),
    "rest": (_tag({"type": "any_text"}), ["", "any\nthing"], []),
}  # fmt: skip


@cache
def _demo_grammars() -> tuple[Tokenizer, Grammars]:
    tokenizer = Tokenizer(demo.path())
    return tokenizer, Grammars(lambda: Vocabulary.of(tokenizer, 4096, tokenizer.eos_token_ids))


def _accepts(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole text of the grammar, token by token in the tokenizer's split."""
    tokenizer, grammars = _demo_grammars()
    matcher = grammars.compile(grammar).matcher()
    matcher.advance(tokenizer.encode(text, add_special_tokens=False))
    return matcher.error is None and bool(_mask(matcher, 4096) & tokenizer.eos_token_ids)


@pytest.mark.parametrize("name", TAGS)
def test_a_structural_tag_matches_its_texts_and_no_others(name: str) -> None:
    """Each type of format, within the demo's vocabulary."""
    grammar, good, bad = TAGS[name]
    assert [text for text in good if not _accepts(grammar, text)] == []
    assert [text for text in bad if _accepts(grammar, text)] == []


def _json_texts() -> Iterator[tuple[str, bool]]:
    whole = {"a": 1, "b": [True, None, "x"]}
    yield json.dumps(whole), True
    yield json.dumps(whole, separators=(",", ":")), True
    yield json.dumps(whole, indent=2), True
    yield json.dumps(whole, indent=8), True
    yield json.dumps(whole).replace(" ", "  "), False
    yield json.dumps(whole, indent=33), False
    yield json.dumps([1]), False
    yield json.dumps(whole) + "\n", False


def test_expressions_match_whole_texts_whatever_their_characters() -> None:
    """Anchors change nothing; slashes, line breaks and quotes need no escape."""
    for pattern, good, bad in (
        ('a/b\n"c', 'a/b\n"c', "a/b"),
        ("^ab?$", "a", "ba"),
        ("^a|b$", "b", "ab"),
        ("\\d{2}", "07", "7"),
        ("é+|中", "éé", "e"),
    ):
        assert _accepts(Grammar("regex", pattern), good), pattern
        assert not _accepts(Grammar("regex", pattern), bad), pattern


def test_white_space_in_json_is_bounded() -> None:
    """What json.dumps writes is allowed, long runs are not: a model that repeats a space would never end."""
    for text, good in _json_texts():
        assert _accepts(Grammar("json"), text) is good, text


def test_control_tokens_are_never_text() -> None:
    """A special token adds no text, so no grammar takes it, though JSON strings hold any character."""
    tokenizer, grammars = _demo_grammars()
    matcher = grammars.compile(Grammar("json")).matcher()
    matcher.advance(tokenizer.encode('{"a', add_special_tokens=False))
    assert len(_mask(matcher, 4096)) > 2000
    assert not _mask(matcher, 4096) & tokenizer.special_ids


PERSON = closed(
    {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    }
)


@pytest.mark.parametrize("spec", [SpecConfig(2, 4, 4), None], ids=str)
def test_a_checkpoint_answers_within_its_grammar(spec: SpecConfig | None) -> None:
    """The demo with its own tokenizer: the text is the grammar's, and ends with EOS or at the limit."""
    llm = LLM("demo", device="cpu", max_model_len=256, num_pages=32, spec=spec)
    answers = llm.generate(
        ["Once upon a time"] * 3,
        [
            SamplingParams(max_tokens=100, temperature=1.0, seed=1, grammar=schema(PERSON)),
            SamplingParams(max_tokens=9, temperature=0.0, grammar=Grammar("regex", "(la ){50}")),
            SamplingParams(max_tokens=9, temperature=0.0),
        ],
    )
    assert [each.finish_reason for each in answers] == ["stop", "length", "length"]
    value = json.loads(answers[0].text)
    assert set(value) == {"name", "age"}
    assert 0 <= value["age"] <= 150
    assert re.fullmatch("(la )*(l|la)?", answers[1].text)


DEEP = {
    "rules": ("ebnf", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4700)) + '\nr4700: "a"'),
    "terminals": ("ebnf", "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(3800)) + '\nT3800: "a"'),
    "references": (
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/a0",
                "$defs": {
                    **{f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1440)},
                    "a1440": {"type": "integer"},
                },
            }
        ),
    ),
}
"""Chains as long as a grammar's text may hold: the library calls itself once a link."""

SCRIPT = """
import sys
from nextn import demo
from nextn.engine.grammar import Grammar, Grammars, Vocabulary
from nextn.text import Tokenizer

tokenizer = Tokenizer(demo.path())
grammars = Grammars(lambda: Vocabulary.of(tokenizer, 4096, tokenizer.eos_token_ids))
compiled = grammars.compile(Grammar(sys.argv[1], sys.stdin.read()))
matcher = compiled.matcher()
print(matcher.check())
matcher.advance(tokenizer.encode("a", add_special_tokens=False) * 2)  # not allowed, so it begins anew
print(matcher.error is not None)
"""


@pytest.mark.parametrize("name", DEEP)
def test_a_grammar_of_thousands_of_links_ends_no_process(name: str) -> None:
    """It is compiled, and begun anew from a thread with an ordinary stack, which it would overflow."""
    kind, text = DEEP[name]
    assert len(text) <= MAX_TEXT
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "None\nTrue\n"), done.stderr[-500:]
