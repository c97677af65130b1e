"""The API's request bodies, whose every field is honoured or refused, and its errors.

A field that nextn cannot honour is accepted only with the values that ask for nothing.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import from_json

from nextn.engine.grammar import Grammar, GrammarsBusy
from nextn.engine.request import MAX_STOP_STRINGS, SamplingParams
from nextn.errors import NextnError, RequestError
from nextn.server.constraints import Constraints
from nextn.server.fields import (
    AtMost,
    CacheSalt,
    Choices,
    Count,
    Int64,
    LogitBias,
    Metadata,
    Only,
    Positive,
    Priority,
    Prompts,
    Strict,
    TemplateArguments,
    TopK,
    TopLogprobs,
    invalid,
    listed,
)
from nextn.server.messages import AnyToolChoice, Messages, ToolChoice, Tools

_T = TypeVar("_T")
_BodyT = TypeVar("_BodyT", bound=Strict)

COMPLETION_MAX_TOKENS = 16
"""Default of max_tokens in /v1/completions, as OpenAI documents it."""

_MAX_MESSAGE = 1000
"""Longest message of an error: those of a library may repeat what the client sent."""

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request that is being answered."""


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
        if len(message) > _MAX_MESSAGE:
            message = message[: _MAX_MESSAGE - 3] + "..."
        super().__init__(message)
        self.status = status
        self.headers = headers
        self._detail = {"message": message, "type": _error_type(status), "param": param, "code": code}

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object, and the id of the request that it answers."""
        return {"error": self._detail | {"request_id": REQUEST_ID.get()}}

    @staticmethod
    def of_validation(error: ValidationError) -> ApiError:
        """400 that names the first field at fault."""
        first = error.errors(include_url=False, include_input=False)[0]
        # Which branch of a union was tried is no part of a field's name; such parts are no identifiers.
        parts = [str(part) for part in first["loc"] if re.fullmatch(r"\w{1,64}", str(part))]
        if first["type"] == "no_role":  # of a message, whose type that would have chosen
            parts.append("role")
        if field := first.get("ctx", {}).get("field"):
            parts.append(field)
        if first["type"] == "extra_forbidden":
            return ApiError._of_unknown(first["loc"], parts)
        param = ".".join(parts)[:100]
        if first["type"] == "missing":
            return ApiError(400, f"{param} is required", param=param, code="missing")
        code = first["type"] if first["type"] == "unsupported" else "invalid_value"
        message = first["msg"][:1].lower() + first["msg"][1:]
        return ApiError(400, f"{param}: {message}" if param else message, param=param or None, code=code)

    @staticmethod
    def _of_unknown(place: tuple[int | str, ...], parts: list[str]) -> ApiError:
        """400 for the field at `place`, which is named if its name is fit to be shown."""
        key = str(place[-1])
        within = ".".join(parts[:-1] if parts[-1:] == [key] else parts)
        if re.fullmatch(r"[!-~]{1,64}", key):
            param = shown = f"{within}.{key}" if within else key
        else:
            param = within or "body"
            shown = f"a field of {param}"
        return ApiError(400, f"{shown} is not supported by this server", param=param, code="unsupported")


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


class StreamOptions(Strict):
    """What a stream brings besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Only(None, False)] = None


class Body(Constraints):
    """What both completions take. `null` stands for a field's default everywhere."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: Annotated[list[str] | None, AtMost(MAX_STOP_STRINGS), BeforeValidator(listed)] = None
    stop_token_ids: Annotated[list[Int64], Field(max_length=256), AtMost(256)] | None = None
    ignore_eos: bool | None = None
    n: Choices | None = None
    logprobs_mode: Literal["processed", "raw"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_speculation: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    user: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    service_tier: Annotated[Any, Only(None, "auto", "default")] = None
    store: Annotated[Any, Only(None, False)] = None
    # What vLLM's and SGLang's clients send with the values that ask for nothing.
    include_stop_str_in_output: Annotated[Any, Only(None, False)] = None
    length_penalty: Annotated[Any, Only(None, 1.0, 1)] = None
    no_stop_trim: Annotated[Any, Only(None, False)] = None
    skip_special_tokens: Annotated[Any, Only(None, True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(None, True)] = None
    use_beam_search: Annotated[Any, Only(None, False)] = None

    @model_validator(mode="after")
    def _agrees(self) -> Body:
        if self.stream_options is not None and not self.stream:
            invalid("is only allowed when stream is true", "stream_options")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            invalid("goes with include_usage true", "stream_options")
        if self.include_speculation and self.stream and not self.include_usage:
            invalid(
                "is part of the usage: in a stream, set stream_options.include_usage", "include_speculation"
            )
        self.constraint  # noqa: B018 (refuses two at once)
        return self

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, if the request says so."""
        return self.max_tokens

    @property
    def top_alternatives(self) -> int | None:
        """How many alternatives to report beside each token; None for no logprobs at all."""
        raise NotImplementedError

    @property
    def echoed_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return None

    def error(self, error: RequestError) -> ApiError:
        """400 for what the engine refuses, with the field's name in this body; 429 if it may do later."""
        if isinstance(error, GrammarsBusy):
            return ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": "10"})
        return ApiError(400, str(error), param=self.field_name(error.field))

    def field_name(self, engine_field: str | None) -> str | None:
        """The engine's name of a field as the one that it has here."""
        if engine_field == "grammar":
            return "tools" if self.constraint is None else self.constraint[0]
        return engine_field

    def sampling_params(self, max_tokens: int, grammar: Grammar | None) -> SamplingParams:
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
            logit_bias=tuple((int(key), float(bias)) for key, bias in (self.logit_bias or {}).items()),
            min_tokens=_or(self.min_tokens, 0),
            logprobs=self.top_alternatives,
            raw_logprobs=self.logprobs_mode == "raw",
            prompt_logprobs=self.echoed_logprobs,
            grammar=grammar,
        )


class CompletionBody(Body):
    """Body of POST /v1/completions. max_tokens 0 is for echo: the prompt's own log-probabilities."""

    prompt: Prompts
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    suffix: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _best_is_all(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.choices:
            invalid("this server gives every answer that it makes; leave it out or make it n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            invalid("must be at least 1, but where echo is true", "max_tokens")
        return self

    @property
    def top_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echoed_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


class ChatBody(Body):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: Annotated[Any, Only(None, True)] = None
    audio: Annotated[Any, Only(None)] = None
    continue_final_message: Annotated[Any, Only(None, False)] = None
    function_call: Annotated[Any, Only(None, "none")] = None
    functions: Annotated[Any, Only(None, [])] = None
    include_reasoning: Annotated[Any, Only(None, True)] = None
    modalities: Annotated[Any, Only(None, ["text"])] = None
    moderation: Annotated[Any, Only(None)] = None
    prediction: Annotated[Any, Only(None)] = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Annotated[Any, Only(None)] = None
    prompt_cache_retention: Annotated[Any, Only(None)] = None
    reasoning_effort: Annotated[Any, Only(None)] = None
    separate_reasoning: Annotated[Any, Only(None, True)] = None
    stream_reasoning: Annotated[Any, Only(None, True)] = None
    verbosity: Annotated[Any, Only(None, "medium")] = None
    web_search_options: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatBody:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            invalid("differs from max_tokens; give one of them", "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            invalid("goes with logprobs true", "top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            invalid("two functions have the same name", "tools")
        if not names and self.tool_choice not in (None, "none"):
            invalid("is only allowed with tools", "tool_choice")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            invalid(f"there is no tool {self.tool_choice.function.name!r}", "tool_choice")
        return self

    @property
    def token_limit(self) -> int | None:
        """max_completion_tokens, or max_tokens, its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_name(self, engine_field: str | None) -> str | None:
        if engine_field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if engine_field == "logprobs" and self.top_logprobs:
            return "top_logprobs"
        return "messages" if engine_field == "prompt" else super().field_name(engine_field)


class TokenizeBody(Strict):
    """Body of POST /tokenize: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: Annotated[Any, Only(None, True)] = None
    continue_final_message: Annotated[Any, Only(None, False)] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            invalid("give either prompt or messages", "prompt")
        for name in ("tools", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name):
                invalid("goes with messages", name)
        return self


class DetokenizeBody(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Int64], Field(max_length=2**20, fail_fast=True)]


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
