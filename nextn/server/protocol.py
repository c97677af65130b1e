"""The OpenAI API in types: request bodies whose every field is honoured or refused, answers, errors.

A field that nextn cannot honour is accepted only with the values that ask for nothing.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from nextn.engine.request import FinishReason, Output, SamplingParams
from nextn.engine.stats import Acceptance
from nextn.errors import NextnError, RequestError

_T = TypeVar("_T")
_BodyT = TypeVar("_BodyT", bound="Body")

MAX_PROMPTS = 64
"""Most prompts in one /v1/completions request."""

COMPLETION_MAX_TOKENS = 16
"""Default of max_tokens in /v1/completions, as OpenAI documents it."""


class ApiError(NextnError):
    """An HTTP error in OpenAI's shape; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @staticmethod
    def of_validation(error: ValidationError) -> ApiError:
        """400 that names the first field at fault."""
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:100]
        if first["type"] == "extra_forbidden":
            return ApiError(400, f"{param} is not supported by this server", param=param, code="unsupported")
        if first["type"] == "missing":
            return ApiError(400, f"{param} is required", param=param, code="missing")
        code = first["type"] if first["type"] == "unsupported" else "invalid_value"
        message = first["msg"][:1].lower() + first["msg"][1:]
        return ApiError(400, f"{param}: {message}" if param else message, param=param or None, code=code)


def _invalid(message: str) -> NoReturn:
    raise PydanticCustomError("invalid", "{message}", {"message": message})


def _only(*accepted: object) -> AfterValidator:
    """Accept the values that ask for nothing, by value and type (1 is not true); refuse all others."""
    listed = " or ".join(json.dumps(value) for value in accepted)

    def check(value: object) -> object:
        if any(type(value) is type(each) and value == each for each in accepted):
            return value
        raise PydanticCustomError("unsupported", "this server supports only {listed}", {"listed": listed})

    return AfterValidator(check)


def _listed(value: object) -> object:
    """A single string stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt (text or token ids) or several, as a list of prompts."""
    if isinstance(value, str) or (value and _is_tokens(value)):
        return [value]  # type: ignore[list-item]
    if not isinstance(value, list) or not value:
        _invalid("must be a string, token ids, or a list of strings or of token ids")
    if len(value) > MAX_PROMPTS:
        _invalid(f"has {len(value)} prompts; at most {MAX_PROMPTS} are taken")
    for item in value:
        if not isinstance(item, str) and not (item and _is_tokens(item)):
            _invalid("must be a string, token ids, or a list of strings or of token ids")
    return value


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


def _content(value: object) -> object:
    """Text of a message: a string, or text parts, which are joined without anything in between."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise PydanticCustomError("unsupported", "only parts of type 'text' are supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            _invalid("a text part has the fields 'type' and 'text', which is a string")
        texts.append(part["text"])
    return "".join(texts)


def _role(value: object) -> object:
    if value in ("tool", "function"):
        raise PydanticCustomError("unsupported", "tool results are not supported by this server")
    return "system" if value == "developer" else value


class _Strict(BaseModel):
    """No coercion, no unknown field, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Message(_Strict):
    """One message of a chat; 'developer' is another name of 'system'."""

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)]
    name: Annotated[Any, _only(None)] = None
    refusal: Annotated[Any, _only(None)] = None
    annotations: Annotated[Any, _only(None, [])] = None
    audio: Annotated[Any, _only(None)] = None
    function_call: Annotated[Any, _only(None)] = None
    tool_calls: Annotated[Any, _only(None, [])] = None


class StreamOptions(_Strict):
    """What a stream brings besides text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, _only(None, False)] = None


_MetadataKey = Annotated[str, StringConstraints(max_length=64)]
_MetadataValue = Annotated[str, StringConstraints(max_length=512)]
_TemplateKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


# Bounds on every integer: Python refuses to write one of more than 4300 digits, even in a message about it.
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _template_value(value: object) -> object:
    if isinstance(value, str) and len(value) > 1024:
        _invalid("a string may have at most 1024 characters")
    if value is not None and not isinstance(value, (bool, int, float, str)):
        _invalid("must be a string, a number, a boolean or null")
    return value


class Body(_Strict):
    """What both endpoints take. `null` stands for a field's default everywhere."""

    model: str | None = None
    max_tokens: _Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: _Int64 | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_listed)] = None
    stop_token_ids: Annotated[list[_Int64], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    n: Annotated[Any, _only(None, 1)] = None
    logit_bias: Annotated[Any, _only(None, {})] = None
    response_format: Annotated[Any, _only(None, {"type": "text"})] = None
    service_tier: Annotated[Any, _only(None, "auto")] = None
    store: Annotated[Any, _only(None, False)] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Body:
        if self.stream_options is not None and not self.stream:
            _invalid("stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, if the request says so."""
        return self.max_tokens

    def error(self, error: RequestError) -> ApiError:
        """400 for what the engine refuses, with the name that the field has in this body."""
        return ApiError(400, str(error), param=self.field_name(error.field))

    def field_name(self, engine_field: str | None) -> str | None:
        """The engine's `prompt` and `max_tokens` under the names that they have here."""
        return engine_field

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters; raises RequestError for a value out of range."""
        top_k = 0 if self.top_k in (None, -1) else self.top_k  # -1 is another engine's "off"
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=_or(top_k, 0),
            min_p=_or(self.min_p, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            seed=self.seed,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionBody(Body):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    best_of: Annotated[Any, _only(None, 1)] = None
    echo: Annotated[Any, _only(None, False)] = None
    logprobs: Annotated[Any, _only(None)] = None
    suffix: Annotated[Any, _only(None)] = None


class ChatBody(Body):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: _Count | None = None
    chat_template_kwargs: (
        Annotated[dict[_TemplateKey, Annotated[Any, AfterValidator(_template_value)]], Field(max_length=16)]
        | None
    ) = None
    audio: Annotated[Any, _only(None)] = None
    function_call: Annotated[Any, _only(None, "none")] = None
    functions: Annotated[Any, _only(None, [])] = None
    logprobs: Annotated[Any, _only(None, False)] = None
    modalities: Annotated[Any, _only(None, ["text"])] = None
    moderation: Annotated[Any, _only(None)] = None
    parallel_tool_calls: Annotated[Any, _only(None, True)] = None
    prediction: Annotated[Any, _only(None)] = None
    prompt_cache_key: Annotated[Any, _only(None)] = None
    prompt_cache_options: Annotated[Any, _only(None)] = None
    prompt_cache_retention: Annotated[Any, _only(None)] = None
    reasoning_effort: Annotated[Any, _only(None)] = None
    tool_choice: Annotated[Any, _only(None, "none")] = None
    tools: Annotated[Any, _only(None, [])] = None
    top_logprobs: Annotated[Any, _only(None, 0)] = None
    verbosity: Annotated[Any, _only(None)] = None
    web_search_options: Annotated[Any, _only(None)] = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            _invalid("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def token_limit(self) -> int | None:
        """max_completion_tokens, or max_tokens, its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def field_name(self, engine_field: str | None) -> str | None:
        if engine_field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if engine_field == "prompt" else engine_field


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def parse_body(kind: type[_BodyT], content: bytes) -> _BodyT:
    """The body as its type; raises ApiError 400 that says what is wrong and where."""
    try:
        parsed = from_json(content, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        raise ApiError.of_validation(error) from None


class Usage:
    """Token counts of a request, summed over its choices, and what speculation did for them."""

    def __init__(self) -> None:
        self._last: dict[str, Output] = {}

    def record(self, output: Output) -> None:
        """Take the counts as of this output."""
        self._last[output.request_id] = output

    def body(self) -> dict[str, object]:
        """OpenAI's usage object; `speculation` is nextn's own and left out where no cycle ran."""
        prompt = sum(output.prompt_tokens for output in self._last.values())
        completion = sum(output.completion_tokens for output in self._last.values())
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        total = Acceptance()
        for output in self._last.values():
            total.merge(output.acceptance)
        if total.cycles:
            usage["speculation"] = {
                "cycles": total.cycles,
                "drafted_tokens": total.drafted,
                "accepted_tokens": total.emitted - total.cycles,
                "acceptance_length": round(total.length, 3),
            }
        return usage


class Reply:
    """The answer's shape at one endpoint: whole, or as the chunks of a stream."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, model: str, choices: int) -> None:
        self.choices = choices
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Iterable[dict[str, object]], usage: Usage) -> dict[str, object]:
        """Body of an answer that is not streamed."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": list(choices),
            "usage": usage.body(),
        }

    def chunk(self, choices: Iterable[dict[str, object]]) -> dict[str, object]:
        """One chunk of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": list(choices)}

    def choice(self, index: int, text: str, reason: FinishReason) -> dict[str, object]:
        """One whole choice."""
        return self.delta(index, text) | {"finish_reason": reason}

    def opening(self, index: int) -> dict[str, object] | None:
        """What a stream says of a choice before its text, if anything."""
        return None

    def delta(self, index: int, text: str) -> dict[str, object]:
        """New text of a choice."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def ending(self, index: int, reason: FinishReason) -> dict[str, object]:
        """The end of a choice."""
        return self.delta(index, "") | {"finish_reason": reason}


class ChatReply(Reply):
    """Shape of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: FinishReason) -> dict[str, object]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, object] | None:
        return self._chat_delta(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str) -> dict[str, object]:
        return self._chat_delta(index, {"content": text})

    def ending(self, index: int, reason: FinishReason) -> dict[str, object]:
        return self._chat_delta(index, {}) | {"finish_reason": reason}

    @staticmethod
    def _chat_delta(index: int, delta: dict[str, str]) -> dict[str, object]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
