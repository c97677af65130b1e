"""Types of fields that several request bodies share: strict, bounded, and refusing by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nextn.engine.request import MAX_BIASES, MAX_LOGPROBS

MAX_PROMPTS = 64
"""Most prompts in one /v1/completions request."""

MAX_CHOICES = 16
"""Largest n."""


MAX_FIELDS = 128
"""Most fields of one object: each that is unknown would cost an error of its own, which nobody reads."""


class Strict(BaseModel):
    """No coercion, no unknown field, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _is_small(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            invalid(f"has {len(value)} fields; at most {MAX_FIELDS} are taken")
        return value


class AtMost:
    """Refuse a list or an object of more entries before any of them is looked at."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        if isinstance(value, dict | list) and len(value) > self._most:
            invalid(f"has {len(value)} entries; at most {self._most} are taken")
        return value


def invalid(message: str, field: str | None = None) -> NoReturn:
    """Refuse the value that is being validated; where that is the whole body, `field` of it."""
    raise PydanticCustomError("invalid", "{message}", {"message": message, "field": field})


def unsupported(message: str) -> NoReturn:
    """Refuse a value that is right in itself but not served here."""
    raise PydanticCustomError("unsupported", "{message}", {"message": message})


class Only:
    """Accept the values that ask for nothing, by value and type (1 is not true); refuse all others."""

    def __init__(self, *accepted: object) -> None:
        self._accepted = accepted

    def __get_pydantic_core_schema__(self, _: object, __: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.no_info_plain_validator_function(self._check)
        schema["metadata"] = {"pydantic_js_functions": [lambda *_: {"enum": list(self._accepted)}]}
        return schema

    def _check(self, value: object) -> object:
        if any(type(value) is type(each) and value == each for each in self._accepted):
            return value
        unsupported("this server supports only " + " or ".join(json.dumps(each) for each in self._accepted))


def listed(value: object) -> object:
    """A single string stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt (text or token ids) or several, as a list of prompts."""
    if isinstance(value, str) or (value and _is_tokens(value)):
        return [value]  # type: ignore[list-item]
    if not isinstance(value, list) or not value:
        invalid("must be a string, token ids, or a list of strings or of token ids")
    if len(value) > MAX_PROMPTS:
        invalid(f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken")
    for item in value:
        if not isinstance(item, str) and not (item and _is_tokens(item)):
            invalid("must be a string, token ids, or a list of strings or of token ids")
    return value


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


def _bias(value: object) -> object:
    """OpenAI's object of token ids, which JSON makes strings; each id may be spelt in one way only."""
    if not isinstance(value, dict):
        return value
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11 and str(int(key)) == key):
            invalid("each key must be a token id, written in decimal digits")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            invalid("each value must be a number from -100 to 100")
    return value


# Bounds on every integer: Python refuses to write one of more than 4300 digits, even in a message about it.
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
LogitBias = Annotated[
    dict[str, Any],
    AtMost(MAX_BIASES),
    AfterValidator(_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
    AtMost(16),
]


def _template_value(value: object) -> object:
    if isinstance(value, str) and len(value) > 1024:
        invalid("a string may have at most 1024 characters")
    if value is not None and not isinstance(value, (bool, int, float, str)):
        invalid("must be a string, a number, a boolean or null")
    return value


TemplateArguments = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")],
        Annotated[Any, AfterValidator(_template_value)],
    ],
    Field(max_length=16),
    AtMost(16),
]
