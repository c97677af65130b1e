"""The text side of chat: OpenAI's messages and tools into a checkpoint's template, its answers back out.

What a template does with a probe says which format its checkpoint speaks. Parsing works on text alone, so
an answer's pieces do not depend on how many tokens a step brought.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import AfterValidator

from nextn.engine.grammar import MAX_DEPTH, MAX_TEXT, Grammar, nesting
from nextn.errors import RequestError
from nextn.server.fields import invalid
from nextn.text import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    MARKERS,
    SEPARATOR,
    THINK,
    THINK_END,
)

CallStyle = Literal["v3", "v3.1"]
"""v3: `function` SEPARATOR name, line break, arguments in a json fence. v3.1: name SEPARATOR arguments."""

Choice = str | Mapping[str, Any] | None
"""OpenAI's tool_choice: none, auto, required, or an object that names a function."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments of the call with this index."""

    index: int
    text: str


Piece = Reasoning | Content | ToolCall | ToolArguments


def delta(piece: Piece) -> dict[str, Any]:
    """The piece as the `delta` of a stream's chunk."""
    match piece:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case ToolCall(index, identity, name):
            function = {"name": name, "arguments": ""}
            return {
                "tool_calls": [{"index": index, "id": identity, "type": "function", "function": function}]
            }
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The pieces as the `message` of an answer that is not streamed; content is null beside bare calls."""
    reasoning, content = "", ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case ToolCall(_, identity, name):
                function = {"name": name, "arguments": ""}
                calls.append({"id": identity, "type": "function", "function": function})
            case ToolArguments(index, text):
                calls[index]["function"]["arguments"] += text
    answer: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        answer["reasoning_content"] = reasoning
    if calls:
        answer["tool_calls"] = calls
    return answer


class Templates(Protocol):
    """What is needed of `nextn.text.Tokenizer`."""

    @property
    def chat_template(self) -> str:
        """The template's text, empty if there is none."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt that the template makes; RequestError if it refuses."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a checkpoint's template writes reasoning and tool calls, found out by `of`.

    reasons: it knows `</think>`. calls: how it writes a call; None if it cannot. takes_tools: it describes
    the tools itself. arguments: it wants a call's arguments as the JSON text, or as the object that it
    writes as JSON. bare_content: what it wants as content where an answer has calls alone. calls_beside_text:
    it writes both content and calls of one message; the first releases drop the calls then.
    """

    reasons: bool = False
    calls: CallStyle | None = None
    takes_tools: bool = False
    arguments: Literal["text", "object"] = "text"
    bare_content: str | None = None
    calls_beside_text: bool = True

    @staticmethod
    def of(tokenizer: Templates) -> ChatFormat:
        """The format of this tokenizer's template; it renders a handful of tiny chats, so keep the result."""
        reasons = THINK_END in tokenizer.chat_template
        takes_tools = _PROBE in _try(tokenizer, [_ASKED], [_PROBE_TOOL])
        for arguments in (_PROBE_ARGUMENTS, json.loads(_PROBE_ARGUMENTS)):
            for content in (None, ""):
                style = _style(_try(tokenizer, [_ASKED, *_probed(content, arguments)]))
                if style is not None:
                    both = _try(tokenizer, [_ASKED, *_probed("Looking.", arguments)])
                    return ChatFormat(
                        reasons=reasons,
                        calls=style,
                        takes_tools=takes_tools,
                        arguments="text" if isinstance(arguments, str) else "object",
                        bare_content=content,
                        calls_beside_text="Looking." in both and _style(both) is not None,
                    )
        return ChatFormat(reasons=reasons, takes_tools=takes_tools)

    def prompt(
        self,
        tokenizer: Templates,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        choice: Choice = None,
        /,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt for OpenAI's messages and tools (as JSON data, text parts joined or not).

        With tool_choice "none" the tools stay out of it. Raise RequestError if the template has no calls.
        """
        shown = [] if choice == "none" else [_tool_for_template(tool) for tool in tools]
        if shown and self.calls is None:
            raise RequestError("the model's chat template has no form for tool calls", "tools")
        ready = self.messages(messages)
        if shown and not self.takes_tools:
            ready, shown = _described(ready, self._description(shown)), []
        return tokenizer.chat_text(ready, shown or None, **chat_template_kwargs)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """OpenAI's messages as this template takes them.

        `developer` becomes `system`; reasoning of earlier answers is left out, as the templates do. Tool
        results come in the order of the calls that they answer, for the templates show no ids.
        """
        return [ready for message in _in_order_of_calls(messages) for ready in self._ready(message)]

    def _ready(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        role, content = message["role"], _text(message.get("content"))
        calls = [self._call(call) for call in _calls_of(message)]
        if role in ("tool", "function"):  # the latter is the older name, without an id
            yield {"role": "tool", "content": content, "tool_call_id": message.get("tool_call_id")}
        elif role == "assistant" and calls:
            if content and not self.calls_beside_text:
                yield {"role": "assistant", "content": content}
                content = ""
            yield {"role": "assistant", "content": content or self.bare_content, "tool_calls": calls}
        else:  # templates test whether tool_calls is there, so it must not be there empty
            yield {"role": "system" if role == "developer" else role, "content": content}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments == "object":
            arguments = _object_of(arguments)
        function = {"name": call["function"]["name"], "arguments": arguments}
        return {"id": call.get("id"), "type": "function", "function": function}

    def _description(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system message says of the tools where the template says nothing."""
        entries = []
        for tool in tools:
            function = tool["function"]
            schema = json.dumps(function["parameters"], ensure_ascii=False)
            entries.append(
                f"### {function['name']}\nDescription: {function['description']}\n\nParameters: {schema}\n"
            )
        begin, end = self.call_ends("TOOL_NAME")
        form = f"{CALLS_BEGIN}{begin}ARGUMENTS{end}{CALLS_END}"
        return "\n".join(
            [
                "## Tools\nThese tools are at your disposal:\n",
                *entries,
                f"A call of a tool has exactly this form:\n{form}\n",
                "TOOL_NAME is the name of one of the tools above. ARGUMENTS is a JSON object that is valid "
                "under that tool's Parameters. Several calls stand one after the other, "
                f"{'each on a line of its own' if self.separator else 'nothing between them'}, "
                f"before {CALLS_END}.",
            ]
        )

    @property
    def separator(self) -> str:
        """What stands between two calls."""
        return "" if self.calls == "v3.1" else "\n"

    def call_ends(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call."""
        if self.calls == "v3.1":
            return f"{CALL_BEGIN}{name}{SEPARATOR}", CALL_END
        return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n", f"\n```{CALL_END}"

    def thinking(self, prompt: str) -> bool | None:
        """Whether the answer to this prompt begins inside the reasoning; None if the model may open it."""
        end = prompt[-64:].rstrip()
        if not self.reasons or end.endswith(THINK_END):
            return False
        return True if end.endswith(THINK) else None


_PROBE = "probe_a9f3"
_PROBE_ARGUMENTS = '{"city": "Ulm"}'
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_ASKED = {"role": "user", "content": "Hi"}


def _probed(content: str | None, arguments: object) -> list[dict[str, Any]]:
    call = {"id": "call_0", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
    return [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "Sunny.", "tool_call_id": "call_0"},
    ]


def _try(
    tokenizer: Templates, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> str:
    """What the template makes of a probe; nothing if it refuses it."""
    try:
        return tokenizer.chat_text(messages, tools)
    except RequestError:
        return ""


def _style(text: str) -> CallStyle | None:
    """How the probe's call is written in `text`; None if it, its arguments or its result are not there."""
    if _PROBE_ARGUMENTS not in text or CALL_BEGIN not in text or "Sunny." not in text:
        return None
    if f"{SEPARATOR}{_PROBE}" in text:
        return "v3"
    return "v3.1" if f"{_PROBE}{SEPARATOR}" in text else None


def _tool_for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with every field that a template may want, and none that is only the server's business."""
    function = tool["function"]
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        },
    }


def _described(messages: list[dict[str, Any]], description: str) -> list[dict[str, Any]]:
    """The description at the end of the last system message: some templates show only that one."""
    systems = [i for i, message in enumerate(messages) if message["role"] == "system"]
    if not systems:
        return [{"role": "system", "content": description}, *messages]
    last = messages[systems[-1]]
    joined = last | {"content": f"{last['content']}\n\n{description}" if last["content"] else description}
    return [*messages[: systems[-1]], joined, *messages[systems[-1] + 1 :]]


def _text(content: object) -> str:
    """Text of a message's content: a string, text parts or null."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A message's calls, the one of the older API among them."""
    older = message.get("function_call")
    return message.get("tool_calls") or ([{"function": older}] if older else [])


def _object_of(arguments: str) -> object:
    """What a call's arguments say; the text itself where an earlier answer's are broken."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _in_order_of_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    ordered: list[Mapping[str, Any]] = []
    results: list[Mapping[str, Any]] = []
    places: dict[object, int] = {}
    for message in (*messages, {"role": ""}):
        if message["role"] in ("tool", "function"):
            results.append(message)
            continue
        ordered += sorted(results, key=lambda result: places.get(result.get("tool_call_id"), len(places)))
        ordered.append(message)
        results = []
        places = {call.get("id"): i for i, call in enumerate(_calls_of(message))}
    return ordered[:-1]


class ChatParser:
    """One answer's text as pieces: reasoning, content and tool calls, as soon as they are certain.

    The joined pieces are the same however the text is cut. White space is kept as it is, but for: what
    stands before `<think>`, around a call and its arguments, and a blank content beside calls. No text
    raises, and none is lost:
      * without `</think>` all that follows is reasoning, markers of calls among it;
      * a call of an unknown tool, or with arguments that are no JSON, is a call all the same;
      * a call that is cut off has the arguments as far as they came; the next call or the end of all
        calls ends it too. One whose name is not complete is content, marker and all;
      * text between and after calls is content;
      * a marker inside a string of the arguments ends the call: as a token of its own it means that.
    """

    def __init__(
        self,
        form: ChatFormat,
        *,
        tools: bool,
        thinking: bool | None,
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        self._style = form.calls if tools else None
        self._thinking = thinking
        self._new_id = new_id
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._calls = 0
        self._fenced = False
        self._blank: str | None = ""
        """White space that is content only if text follows it; None where it is content for certain."""
        self._step = self._content if thinking is False else self._opening

    @staticmethod
    def of(
        form: ChatFormat,
        *,
        tools: Sequence[object] | None = None,
        tool_choice: object = None,
        thinking: bool | None = None,
    ) -> ChatParser:
        """The parser for an answer; `thinking` is what `ChatFormat.thinking` says of its prompt."""
        if not form.reasons:
            thinking = False
        return ChatParser(form, tools=bool(tools) and tool_choice != "none", thinking=thinking)

    @property
    def has_called(self) -> bool:
        """Whether a call has begun: then finish_reason 'stop' is 'tool_calls'."""
        return self._calls > 0

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what it makes certain (often nothing)."""
        self._buffer += text
        return self._run(last=False)

    def finish(self) -> list[Piece]:
        """Return the rest, for an answer that has ended."""
        return self._run(last=True)

    def _run(self, *, last: bool) -> list[Piece]:
        while self._step(last):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each step takes what it can from the buffer; it returns whether the next one has anything to do.

    def _opening(self, last: bool) -> bool:
        """Before the first word: `<think>`, even where the prompt has it already, or anything else."""
        text = self._buffer.lstrip()
        blank = len(self._buffer) - len(text)
        if blank <= _MAX_HELD and text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._step = self._reasoning
            return True
        if blank <= _MAX_HELD and THINK.startswith(text) and not last:
            return False
        self._step = self._reasoning if self._thinking else self._content
        return True

    def _reasoning(self, last: bool) -> bool:
        found = _END_OF_REASONING.search(self._buffer)
        self._say(Reasoning, self._take(found, last))
        if found:
            self._step = self._content
        return found is not None

    def _content(self, last: bool) -> bool:
        if self._style is None:
            self._say(Content, self._buffer)
            self._buffer = ""
            return False
        found = _BEGIN_OF_CALL.search(self._buffer)
        self._say_content(self._take(found, last))
        if found:
            self._blank = ""
            if found[0] == CALL_BEGIN:
                self._step = self._header
        elif last and not self.has_called:
            self._say(Content, self._blank or "")
            self._blank = ""
        return found is not None

    def _header(self, last: bool) -> bool:
        """The name of a call, or what turns out to be none."""
        end = _END_OF_CALL.search(self._buffer)
        whole = end is not None and end.start() <= _MAX_HEADER
        scope = self._buffer[: end.start() if end and whole else _MAX_HEADER]
        found = self._name(scope, whole)
        if found is not None:
            name, used = found
            self._buffer = self._buffer[used:]
            self._pieces.append(ToolCall(self._calls, self._new_id(), name))
            self._calls += 1
            self._fenced = False
            self._step = self._lead
        elif whole or last or len(self._buffer) > _MAX_HEADER + len(CALLS_BEGIN):
            self._say_content(CALL_BEGIN)
            self._step = self._content
        else:
            return False
        return True

    def _name(self, scope: str, whole: bool) -> tuple[str, int] | None:
        """The name in the beginning of a call, and how many characters it takes; None if there is none (yet).

        `whole`: what ends the call comes next. A v3 checkpoint that leaves out the type is understood too.
        """
        kind, separator, rest = scope.partition(SEPARATOR)
        used = len(kind) + len(separator)
        if not separator:
            return None
        if self._style == "v3.1" or kind.strip() != "function":
            return (kind.strip(), used) if kind.strip() else None
        found = _NAME.match(rest)
        if found:
            return found[1], used + found.end(1)
        if whole and _BARE_NAME.fullmatch(rest):
            return rest.strip(), len(scope)
        return None

    def _lead(self, last: bool) -> bool:
        """White space and the fence before the arguments."""
        self._buffer = self._buffer.lstrip()
        if not last and (not self._buffer or (not self._fenced and "```".startswith(self._buffer))):
            return False
        fence = None if self._fenced else _FENCE.match(self._buffer)
        if fence is None:
            self._step = self._arguments
            return True
        if fence.end() == len(self._buffer) and len(fence[1]) < _MAX_HELD and not last:
            return False
        self._fenced = True
        self._buffer = self._buffer[fence.end() :]
        return True

    def _arguments(self, last: bool) -> bool:
        """The arguments as they come, but for the white space and the fence that may end them."""
        found = _END_OF_CALL.search(self._buffer)
        end = found.start() if found else len(self._buffer) - (0 if last else _partial(self._buffer))
        patterns = _FENCED if self._fenced else _PLAIN
        closing = patterns.ended if found else patterns.cut if last else patterns.open
        kept = closing.search(self._buffer, max(0, end - _MAX_HELD), end)
        assert kept is not None  # each of them matches the empty end
        text, rest = self._buffer[: kept.start()], self._buffer[end:]
        if text:
            self._add(ToolArguments(self._calls - 1, text))
        if not found:
            self._buffer = "" if last else self._buffer[kept.start() :]
            return False
        self._buffer = rest.removeprefix(CALL_END)
        self._blank = ""
        self._step = self._content
        return True

    def _take(self, found: re.Match[str] | None, last: bool) -> str:
        """The buffer up to the marker, which is taken too, or up to what could become one."""
        end = found.start() if found else len(self._buffer) - (0 if last else _partial(self._buffer))
        text = self._buffer[:end]
        self._buffer = self._buffer[found.end() if found else end :]
        return text

    def _say_content(self, text: str) -> None:
        if self._blank is None or text.strip():
            self._say(Content, (self._blank or "") + text)
            self._blank = None
        else:
            self._blank += text

    def _say(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        if text:
            self._add(kind(text))

    def _add(self, piece: Reasoning | Content | ToolArguments) -> None:
        """Add text, to the last piece if it is of the same kind."""
        last = self._pieces[-1] if self._pieces else None
        match last, piece:
            case (Reasoning(before), Reasoning(text)):
                self._pieces[-1] = Reasoning(before + text)
            case (Content(before), Content(text)):
                self._pieces[-1] = Content(before + text)
            case (ToolArguments(index, before), ToolArguments(_, text)):
                self._pieces[-1] = ToolArguments(index, before + text)
            case _:
                self._pieces.append(piece)


# Bounds on what is held back: text that goes beyond them is no longer part of a marker or a name.
_MAX_HELD = 64
_MAX_HEADER = 512

_END_OF_REASONING = re.compile(re.escape(THINK_END))
_BEGIN_OF_CALL = re.compile("|".join(map(re.escape, (CALLS_BEGIN, CALLS_END, CALL_BEGIN))))
_END_OF_CALL = re.compile("|".join(map(re.escape, (CALL_END, CALLS_END, CALL_BEGIN))))
_NAME = re.compile(r"\s*([^\s`{][^\n`{]*?)[^\S\n]*[\n`{]")
_BARE_NAME = re.compile(r"\s*[^\s`{][^\n`{]*")
_FENCE = re.compile(rf"```([A-Za-z]{{0,{_MAX_HELD}}})")


class _Closing(NamedTuple):
    """What closes the arguments and is none of them: before a marker, at the end of all text, so far."""

    ended: re.Pattern[str]
    cut: re.Pattern[str]
    open: re.Pattern[str]


_PLAIN = _Closing(re.compile(r"\s*\Z"), re.compile(r"\Z"), re.compile(r"\s*\Z"))
# No string of JSON has a line break in it, so a fence behind one is a fence even where the text is cut off.
_FENCED = _Closing(
    re.compile(r"\s*(?:```)?\s*\Z"),
    re.compile(r"(?:\s*\n```\s*)?\Z"),
    re.compile(r"\s*`{0,3}\s*\Z"),
)


def _partial(text: str) -> int:
    """How many characters at the end of `text` could begin a marker; each has its only '<' at its start."""
    start = text.rfind("<", max(0, len(text) - len(CALLS_BEGIN)))
    tail = text[start:]
    return len(tail) if start >= 0 and any(marker.startswith(tail) for marker in MARKERS) else 0


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse what cannot be the JSON schema of a function's arguments, and what is too large to show."""
    if schema.get("type", "object") != "object":
        invalid("the schema of a function's parameters must have the type 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        invalid("properties must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        invalid("required must be a list of strings")
    if nesting(schema) > MAX_DEPTH:
        invalid(f"the schema is nested deeper than {MAX_DEPTH}")
    if len(json.dumps(schema, ensure_ascii=False)) > MAX_TEXT:
        invalid(f"the schema has more than {MAX_TEXT} characters")
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]
"""Type of `parameters` in a tool's function."""


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: Choice,
    form: ChatFormat,
    *,
    thinking: bool | None = False,
    parallel: bool = True,
    otherwise: Grammar | None = None,
) -> Grammar | None:
    """What an answer must match under this tool_choice; None if it may be any text.

    "required": one or more calls and nothing else. A named function: one call of it. "auto": calls and
    nothing else, or what `otherwise` asks of an answer; without it any text, but from the first call on as
    above, and a grammar is needed only for a tool with strict arguments or to allow no second call.
    `thinking` (see `ChatFormat.thinking`) puts free reasoning before it. Without `parallel` there is at
    most one call.
    """
    if not tools or choice == "none":
        return None if otherwise is None else behind_reasoning(otherwise, thinking)
    if form.calls is None:
        raise RequestError("the model's chat template has no form for tool calls", "tools")
    functions = [tool["function"] for tool in tools]
    forced = choice not in (None, "auto")
    is_strict = any(function.get("strict") for function in functions)
    if not (forced or is_strict or otherwise) and parallel:
        return None
    if isinstance(choice, Mapping):
        wanted = choice["function"]["name"]
        functions = [function for function in functions if function["name"] == wanted]
        if not functions:
            raise RequestError(f"there is no tool {wanted!r}", "tool_choice")
        parallel = False
    calls = {
        "type": "tags_with_separator",
        "tags": [_call_tag(function, form, forced) for function in functions],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    section: dict[str, Any] = {"type": "tag", "begin": CALLS_BEGIN, "content": calls, "end": CALLS_END}
    if not forced and otherwise is not None:
        section = {"type": "or", "elements": [section, _form_of(otherwise)]}
    elif not forced:
        section = {
            "type": "triggered_tags",
            "triggers": [CALLS_BEGIN],
            "tags": [section],
            "at_least_one": False,
            "stop_after_first": True,
        }
    return _structural_tag(section, thinking)


def _call_tag(function: Mapping[str, Any], form: ChatFormat, forced: bool) -> dict[str, Any]:
    """A call of `function`; its schema binds unless the tool says otherwise or nothing asks for it."""
    begin, end = form.call_ends(function["name"])
    strict = function.get("strict")
    schema = function.get("parameters") if strict or (forced and strict is None) else None
    content = {"type": "json_schema", "json_schema": {"type": "object"} | (schema or {})}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def behind_reasoning(grammar: Grammar, thinking: bool | None) -> Grammar:
    """The grammar for an answer whose reasoning comes first and is free; itself where there is none."""
    return grammar if thinking is False else _structural_tag(_form_of(grammar), thinking)


def _form_of(grammar: Grammar) -> dict[str, Any]:
    """The grammar as a part of a structural tag."""
    match grammar.kind:
        case "json":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            form: dict[str, Any] = json.loads(grammar.text)["format"]
            return form


def _structural_tag(form: dict[str, Any], thinking: bool | None) -> Grammar:
    """A structural tag (see nextn/engine/structural_tag.py); behind reasoning two lines may be blank."""
    if thinking is not False:
        begin = "" if thinking else THINK
        free = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": THINK_END}
        blank = {"type": "regex", "pattern": "\\n{0,2}"}
        reasoning: dict[str, Any] = {"type": "sequence", "elements": [free, blank]}
        before = reasoning if thinking else {"type": "optional", "content": reasoning}
        form = {"type": "sequence", "elements": [before, form]}
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    return Grammar("structural_tag", text)
