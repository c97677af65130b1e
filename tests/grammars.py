"""A vocabulary for the tiny model, in which JSON can be written, and grammars over it."""

from __future__ import annotations

import json
from typing import Any

from nextn.engine.engine import Engine
from nextn.engine.grammar import Grammar, Grammars, Vocabulary
from tests.tiny import TINY, tiny_engine

EOS = frozenset({1, 3})
TOKENS: tuple[bytes, ...] = (
    b"", b"", b" ", b"", b"\n", *(bytes([byte]) for byte in b'{}[]":,-0123.abcdeflnrstu'),
    b'":', b'","', b'{"', b'"}', b"true", b"false", b"null", b"alse", b"bc", b"ab",
)  # fmt: skip


def encode(text: str) -> list[int]:
    """The longest token that fits, again and again; what no token spells is left out."""
    rest, found = text.encode(), []
    while rest:
        best = max(
            (token for token, each in enumerate(TOKENS) if each and rest.startswith(each)),
            key=lambda token: len(TOKENS[token]),
            default=None,
        )
        if best is not None:
            found.append(best)
        rest = rest[len(TOKENS[best]) if best is not None else 1 :]
    return found


VOCABULARY = Vocabulary(TOKENS, EOS, encode)
assert len(TOKENS) == TINY["vocab_size"]


def grammar_engine(**config: Any) -> Engine:
    """A tiny engine whose tokens are `VOCABULARY`'s."""
    engine = tiny_engine(**config)
    engine.eos_token_ids = EOS
    engine.grammars = GRAMMARS
    return engine


GRAMMARS = Grammars(lambda: VOCABULARY)
"""Shared by tests: compiled grammars do not change."""


def schema(value: dict[str, Any]) -> Grammar:
    """A JSON schema as a grammar."""
    return Grammar("json_schema", json.dumps(value))


def spell(tokens: list[int]) -> str:
    """The text of an output."""
    return b"".join(TOKENS[token] for token in tokens).decode()


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """An object's schema with these properties and no others, all of them required unless told otherwise."""
    return {
        "type": "object", "properties": properties, "additionalProperties": False,
        "required": list(properties) if required is None else required,
    }  # fmt: skip


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SHORT = {"type": "string", "maxLength": 4}
BOUNDED: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer range": {"type": "integer", "minimum": -12, "maximum": 130},
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "integer multiple": {"type": "integer", "minimum": 0, "maximum": 30, "multipleOf": 10},
    "const string": {"const": "abc"},
    "const object": {"const": {"a": [1, None], "b": True}},
    "const array": {"const": [1, 2, [3]]},
    "enum strings": {"enum": ["a", "ab", "abc", "bc"]},
    "enum mixed": {"enum": ["a", 3, None, True, [1], {"b": 2}]},
    "enum in object": closed({"a": {"enum": ["ab", "cd"]}, "b": {"enum": [1, 2, 3]}}),
    "string maxLength": {"type": "string", "maxLength": 6},
    "string minLength": {"type": "string", "minLength": 2, "maxLength": 5},
    "string empty": {"type": "string", "maxLength": 0},
    "string exact": {"type": "string", "minLength": 3, "maxLength": 3},
    "pattern letters": {"type": "string", "pattern": "^[abc]{1,4}$"},
    "pattern choice": {"type": "string", "pattern": "^(ab|cd)-[0123]{2}$"},
    "pattern optional": {"type": "string", "pattern": "^a?b?c?$"},
    "pattern and length": {"type": "string", "pattern": "^[ab]+$", "maxLength": 5},
    "date": {"type": "string", "format": "date"},
    "array maxItems": {"type": "array", "items": DIGIT, "maxItems": 3},
    "array minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "array exact": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2},
    "array empty": {"type": "array", "maxItems": 0},
    "array of arrays": {
        "type": "array", "maxItems": 2, "items": {"type": "array", "items": DIGIT, "maxItems": 2},
    },
    "tuple": {
        "type": "array", "prefixItems": [DIGIT, SHORT, {"type": "boolean"}], "items": False,
        "minItems": 3, "maxItems": 3,
    },
    "object empty": closed({}),
    "object required": closed({"a": DIGIT, "b": {"type": "boolean"}}),
    "object optional": closed({"a": DIGIT, "b": SHORT, "c": {"type": "null"}}, ["b"]),
    "object all optional": closed({"a": DIGIT, "b": DIGIT, "c": DIGIT}, []),
    "object nested": closed({"a": closed({"b": closed({"c": DIGIT})})}),
    "object of arrays": closed({"a": {"type": "array", "items": SHORT, "maxItems": 2}, "b": DIGIT}),
    "array of objects": {
        "type": "array", "minItems": 1, "maxItems": 2, "items": closed({"a": DIGIT, "b": SHORT}, ["a"]),
    },
    "anyOf": {"anyOf": [DIGIT, {"type": "string", "maxLength": 2}, {"type": "null"}]},
    "anyOf objects": {"anyOf": [closed({"a": DIGIT}), closed({"b": SHORT})]},
    "oneOf by const": {
        "oneOf": [closed({"t": {"const": "a"}, "n": DIGIT}), closed({"t": {"const": "b"}, "s": SHORT})],
    },
    "allOf": {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 3}]},
    "type list": {"type": ["boolean", "null"]},
    "ref": {"$ref": "#/$defs/digit", "$defs": {"digit": DIGIT}},
    "ref twice": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/s"}, "b": {"$ref": "#/$defs/s"}},
        "required": ["a", "b"], "additionalProperties": False, "$defs": {"s": SHORT},
    },
    "ref chain": {
        "$ref": "#/$defs/a",
        "$defs": {"a": closed({"b": {"$ref": "#/$defs/b"}}), "b": {"enum": ["ab", None]}},
    },
    "draft 7 definitions": {
        "$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"d": DIGIT},
        "type": "array", "items": {"$ref": "#/definitions/d"}, "maxItems": 2,
    },
    "annotations": {"title": "a", "description": "b", "default": 1, "examples": [2], **DIGIT},
    "additional typed": {
        "type": "object", "properties": {"a": DIGIT}, "required": ["a"], "maxProperties": 1,
    },
    "strict strings": closed({"a": {"type": ["string", "null"], "maxLength": 3}, "b": {"type": "boolean"}}),
}  # fmt: skip
"""JSON schemas whose texts are bounded, one or two a keyword, in the manner of the JSON Schema Test Suite."""
