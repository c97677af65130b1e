"""What a body asks of the form of an answer: OpenAI's response_format and the names of vLLM and SGLang.

All of them become one `Grammar`, which the engine's masks enforce; two at once are refused.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import from_json

from nextn.engine.grammar import MAX_TEXT, Grammar
from nextn.server.fields import Strict, invalid, unsupported

_Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]


class JsonSchemaFormat(Strict):
    """The part of response_format that carries the schema; `strict` changes nothing, for it always holds."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    # `schema` is a method of pydantic's models.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def _format(value: object) -> object:
    """Refuse what only one type has where another is meant."""
    if isinstance(value, dict):
        if value.get("type") == "structural_tag":
            unsupported("structural tags are not supported by this server")
        if (value.get("type") == "json_schema") != (value.get("json_schema") is not None):
            invalid("json_schema goes with the type 'json_schema' and with no other")
    return value


class StructuredOutputs(Strict):
    """vLLM's newer way to say the same as its guided_* fields."""

    json_: dict[str, Any] | _Text | None = Field(default=None, alias="json")
    regex: _Text | None = None
    choice: Annotated[list[_Text], Field(min_length=1, max_length=1024)] | None = None
    grammar: _Text | None = None
    json_object: bool | None = None


class Constraints(Strict):
    """The fields of a body that constrain its answer."""

    response_format: Annotated[ResponseFormat, BeforeValidator(_format)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | _Text | None = None
    guided_regex: _Text | None = None
    guided_choice: Annotated[list[_Text], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: _Text | None = None
    json_schema: _Text | None = None
    regex: _Text | None = None
    ebnf: _Text | None = None

    @cached_property
    def constraint(self) -> tuple[str, Grammar] | None:
        """The field that constrains the answer, and how; None without one. Refuses two of them."""
        outputs = self.structured_outputs or StructuredOutputs()
        found = {
            "response_format": _of_format(self.response_format),
            "structured_outputs.json": _of_schema("structured_outputs.json", outputs.json_),
            "structured_outputs.regex": _of_text("regex", outputs.regex),
            "structured_outputs.choice": _of_choice(outputs.choice),
            "structured_outputs.grammar": _of_text("ebnf", outputs.grammar),
            "structured_outputs.json_object": Grammar("json") if outputs.json_object else None,
            "guided_json": _of_schema("guided_json", self.guided_json),
            "guided_regex": _of_text("regex", self.guided_regex),
            "guided_choice": _of_choice(self.guided_choice),
            "guided_grammar": _of_text("ebnf", self.guided_grammar),
            "json_schema": _of_schema("json_schema", self.json_schema),
            "regex": _of_text("regex", self.regex),
            "ebnf": _of_text("ebnf", self.ebnf),
        }
        given = [(name, grammar) for name, grammar in found.items() if grammar is not None]
        if len(given) > 1:
            invalid(f"excludes {given[0][0]}; give one of them", given[1][0])
        return given[0] if given else None


def _of_format(form: ResponseFormat | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.schema_ if form.json_schema is not None else None
    return Grammar("json") if schema is None else _of_schema("response_format", schema)


def _of_schema(name: str, schema: dict[str, Any] | str | None) -> Grammar | None:
    if schema is None:
        return None
    try:
        value = from_json(schema, allow_inf_nan=False) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # no JSON, nested too deeply, or a number that JSON or Python does not write
        value, text = None, ""
    if not isinstance(value, dict):
        invalid("must be a JSON schema, which is a JSON object", name)
    if len(text) > MAX_TEXT:
        invalid(f"the schema has more than {MAX_TEXT} characters", name)
    return Grammar("json_schema", text)


def _of_choice(choice: list[str] | None) -> Grammar | None:
    if choice is None:
        return None
    # Not re.escape: other engines of regular expressions refuse a backslash before what needs none.
    escaped = (re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", each) for each in choice)
    return Grammar("regex", "|".join(f"({each})" for each in escaped))


def _of_text(kind: Literal["regex", "ebnf"], text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)
