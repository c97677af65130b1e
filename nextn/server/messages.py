"""The messages and tools of a chat, one type a role; what a template cannot show is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, field_validator
from pydantic_core.core_schema import ValidationInfo

from nextn.server.chat import Parameters
from nextn.server.fields import AtMost, Only, Strict, invalid, unsupported

MAX_TOOLS = 128
"""Most tools of one chat, as OpenAI documents it."""

MAX_MESSAGES = 4096
"""Most messages of one chat: a template takes its time for each, however short."""

_Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_Id = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _content(value: object) -> object:
    """Text of a message: a string, or text parts, which are joined without anything in between."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            unsupported("only parts of type 'text' are supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            invalid("a text part has the fields 'type' and 'text', which is a string")
        texts.append(part["text"])
    return "".join(texts)


_Content = Annotated[str, BeforeValidator(_content)]


class SystemMessage(Strict):
    """Instructions; 'developer' is another name of 'system'."""

    role: Annotated[
        Literal["system"], BeforeValidator(lambda role: "system" if role == "developer" else role)
    ]
    content: _Content
    name: Annotated[Any, Only(None)] = None


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: _Content
    name: Annotated[Any, Only(None)] = None


class CalledFunction(Strict):
    """The function of a call; its arguments are JSON in a string, as the model wrote them."""

    name: _Name
    arguments: str


class AssistantToolCall(Strict):
    """One call of an earlier answer."""

    id: _Id
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # what is put together from a stream has one


class AssistantMessage(Strict):
    """An earlier answer, as this server gave it."""

    role: Literal["assistant"]
    function_call: CalledFunction | None = None  # the older API's one call
    tool_calls: Annotated[list[AssistantToolCall], Field(max_length=MAX_TOOLS)] | None = None
    content: Annotated[str | None, BeforeValidator(_content)] = Field(default=None, validate_default=True)
    reasoning_content: str | None = None
    refusal: Annotated[Any, Only(None)] = None
    annotations: Annotated[Any, Only(None, [])] = None
    audio: Annotated[Any, Only(None)] = None
    name: Annotated[Any, Only(None)] = None

    @field_validator("content")
    @classmethod
    def _says_or_calls(cls, content: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("tool_calls") and info.data.get("function_call"):
            invalid("goes with tool_calls or function_call, not with both")
        if content is None and not (info.data.get("tool_calls") or info.data.get("function_call")):
            invalid("is required where there are no tool_calls")
        return content


class ToolMessage(Strict):
    """What a tool call brought."""

    role: Literal["tool"]
    content: _Content
    tool_call_id: _Id
    name: _Name | None = None


class FunctionMessage(Strict):
    """What a function brought, in the older API."""

    role: Literal["function"]
    content: _Content
    name: _Name


def _tag(message: object) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)
    role = "system" if role == "developer" else role
    return f"<{role}>" if isinstance(role, str) else None


Message = Annotated[
    Annotated[SystemMessage, Tag("<system>")]
    | Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")]
    | Annotated[FunctionMessage, Tag("<function>")],
    Discriminator(
        _tag,
        custom_error_type="no_role",
        custom_error_message="must be one of system, developer, user, assistant, tool, function",
    ),
]


class FunctionDefinition(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: _Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Strict):
    """OpenAI's tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Strict):
    """The function that must be called."""

    name: _Name


class ToolChoice(Strict):
    """A choice of one tool by name."""

    type: Literal["function"]
    function: ChosenFunction


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), AtMost(MAX_MESSAGES)
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AtMost(MAX_TOOLS)]
AnyToolChoice = Literal["none", "auto", "required"] | ToolChoice


def plain(model: Strict) -> dict[str, Any]:
    """A message, a tool or a choice as JSON data, without what was not given; the older API as the newer."""
    data = model.model_dump(exclude_none=True)
    if isinstance(model, AssistantMessage) and model.function_call is not None:
        data["tool_calls"] = [{"id": "", "type": "function", "function": data.pop("function_call")}]
    if isinstance(model, FunctionMessage):
        data |= {"role": "tool", "tool_call_id": ""}
    return data
