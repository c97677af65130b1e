"""Structural tags as rules of a grammar: text between a begin and an end, such as tool calls and reasoning.

The format is a JSON object {"type": "structural_tag", "format": F}. F has one of the types below; what is not
listed is refused.

| type | members |
|---|---|
| const_string | value |
| json_schema | json_schema |
| regex | pattern |
| grammar | grammar: GBNF or Lark |
| any_text | none; in a tag it ends at the tag's end, else it is the rest of the answer |
| tag | begin, content, end |
| sequence | elements |
| or | elements |
| optional | content |
| tags_with_separator | tags, separator, at_least_one, stop_after_first |
| triggered_tags | triggers, tags, at_least_one, stop_after_first: any text, but from a trigger on a tag |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nextn.errors import RequestError

MAX_DEPTH = 16
"""Nesting of formats; their schemas have a limit of their own."""
ANY = "/(?s:.*)/"

Nested = Callable[[str, Any], dict[str, Any]]
"""From ("json_schema" | "regex" | "grammar", its content) to one entry of llguidance's list of grammars."""


def structural_tag(text: str, nested: Nested) -> str:
    """llguidance's form of a structural tag; raises `RequestError` for a format that cannot be followed."""
    value = json.loads(text)
    if (
        not isinstance(value, dict)
        or value.get("type") != "structural_tag"
        or set(value) - {"type", "format"}
    ):
        raise _error('a structural tag is {"type": "structural_tag", "format": {...}}')
    writer = _Writer(nested)
    start = writer.rule(value.get("format"), depth=0)
    main = "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *writer.nested]})


class _Writer:
    """Collects the rules of one structural tag."""

    def __init__(self, nested: Nested) -> None:
        self.rules: list[str] = []
        self.nested: list[dict[str, Any]] = []
        self._nested = nested

    def rule(self, form: object, depth: int) -> str:
        """The expression that stands for `form` in a rule."""
        if depth > MAX_DEPTH:
            raise _error(f"a structural tag is nested deeper than {MAX_DEPTH}")
        if not isinstance(form, dict):
            raise _error("a structural tag's format must be an object")
        kind = form.get("type")
        if kind in ("json_schema", "regex", "grammar"):
            name = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}[kind]
            return self._reference(kind, _member(form, name, dict if kind == "json_schema" else str))
        if kind in ("sequence", "or"):
            parts = [self.rule(each, depth + 1) for each in _member(form, "elements", list)]
            if not parts:
                raise _error(f"a structural tag's {kind} needs elements")
            return f"({(' ' if kind == 'sequence' else ' | ').join(parts)})"
        if kind == "const_string":
            return _literal(_member(form, "value", str))
        if kind == "any_text":
            _only(form)
            return self._named(ANY)
        if kind == "optional":
            return f"({self.rule(_member(form, 'content', dict), depth + 1)})?"
        if kind == "tag":
            return self._tag(form, "", depth)
        if kind == "tags_with_separator":
            return self._separated(form, depth)
        if kind == "triggered_tags":
            return self._triggered(form, depth)
        raise _error(f"a structural tag of type {kind!r} is not supported")

    def _tag(self, form: Mapping[str, Any], said: str, depth: int) -> str:
        """A tag of which `said` stands there already."""
        _only(form, "begin", "content", "end")
        begin, end = _member(form, "begin", str), _member(form, "end", str)
        content = _member(form, "content", dict)
        if content.get("type") == "any_text" and end:
            _only(content)
            inner = self._until(end)
        else:
            inner = f"{self.rule(content, depth + 1)} {_literal(end)}"
        return f"({_literal(begin[len(said) :])} {inner})"

    def _separated(self, form: Mapping[str, Any], depth: int) -> str:
        _only(form, "tags", "separator", "at_least_one", "stop_after_first")
        tags = [self.rule(each, depth + 1) for each in _tags(form)]
        one = self._named(" | ".join(tags))
        separator = _literal(_member(form, "separator", str))
        run = one if form.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({run})" if form.get("at_least_one") else f"({run})?"

    def _triggered(self, form: Mapping[str, Any], depth: int) -> str:
        """Free text up to a trigger, then a tag that begins with it; behind the last tag free text again."""
        _only(form, "triggers", "tags", "at_least_one", "stop_after_first")
        triggers, tags = _member(form, "triggers", list), _tags(form)
        pieces = []
        for trigger in triggers:
            own = [tag for tag in tags if str(tag.get("begin", "")).startswith(str(trigger))]
            if not isinstance(trigger, str) or not trigger or not own:
                raise _error("each trigger of a structural tag must begin one of its tags")
            rest = " | ".join(self._tag(tag, trigger, depth + 1) for tag in own)
            pieces.append(f"{self._until(trigger)} ({rest})")
        if not all(any(str(tag.get("begin", "")).startswith(str(each)) for each in triggers) for tag in tags):
            raise _error("each tag of a structural tag must begin with one of its triggers")
        one, rest = self._named(" | ".join(pieces)), self._named(ANY)
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"({one} | {rest})"
        return f"({one}{'+' if form.get('at_least_one') else '*'} {rest})"

    def _until(self, end: str) -> str:
        """Any text that ends where `end` first stands."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {ANY} {_literal(end)}")
        return name

    def _named(self, expression: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _reference(self, kind: str, content: object) -> str:
        name = f"g{len(self.nested)}"
        self.nested.append({**self._nested(kind, content), "name": name})
        return f"@{name}"


def _tags(form: Mapping[str, Any]) -> list[dict[str, Any]]:
    tags: list[dict[str, Any]] = _member(form, "tags", list)
    if not tags or not all(isinstance(tag, dict) and tag.get("type") == "tag" for tag in tags):
        raise _error("a structural tag's tags must be a list of tags")
    return tags


def _member(form: Mapping[str, Any], name: str, kind: type) -> Any:
    value = form.get(name)
    if not isinstance(value, kind):
        raise _error(f"a structural tag's {form.get('type')} needs {name!r}")
    return value


def _only(form: Mapping[str, Any], *names: str) -> None:
    if unknown := set(form) - {"type", *names}:
        raise _error(f"a structural tag's {form.get('type')} has no member {min(unknown)!r}")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _error(sentence: str) -> RequestError:
    return RequestError(sentence, "grammar")
