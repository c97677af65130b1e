"""A chat's text: what a checkpoint's template gets, and an answer's pieces, which no cut of the text changes.

The templates of tests/data/chat are small ones with the markers and the habits of the published ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import TypeAdapter, ValidationError

from nextn.engine.grammar import Grammar, Grammars, Vocabulary, mask_words
from nextn.errors import RequestError
from nextn.server.chat import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    MARKERS,
    SEPARATOR,
    ChatFormat,
    ChatParser,
    Content,
    Parameters,
    Piece,
    Reasoning,
    ToolArguments,
    ToolCall,
    behind_reasoning,
    call_grammar,
    delta,
    message,
)
from nextn.text import Tokenizer
from tests.server.byte_bpe import write_tokenizer

TEMPLATES = Path(__file__).parent.parent / "data" / "chat"
BOS, EOS, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
OUTPUT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
OUTPUTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"

V3 = ChatFormat(calls="v3", calls_beside_text=False)
R1 = ChatFormat(reasons=True, calls="v3")
V31 = ChatFormat(reasons=True, calls="v3.1")
V31_TOOLS = ChatFormat(calls="v3.1", takes_tools=True, arguments="object", bare_content="")
FORMATS = {"v3-first": V3, "r1": R1, "v31": V31, "v31-tools": V31_TOOLS}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


class Template:
    """A template as transformers would render it."""

    def __init__(self, text: str) -> None:
        self.chat_template = text
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(text)

    @staticmethod
    def named(name: str) -> Template:
        return Template((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))

    def chat_text(self, messages: Any, tools: Any = None, /, **more: Any) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, bos_token=BOS, add_generation_prompt=True, **more
            )
        except Exception as error:
            raise RequestError(str(error), "messages") from error


# ---- what comes out --------------------------------------------------------------------------------------


def v3(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def parsed(form: ChatFormat, thinking: bool | None, parts: list[str], *, tools: bool = True) -> list[Piece]:
    ids = iter(range(1000))
    parser = ChatParser(form, tools=tools, thinking=thinking, new_id=lambda: f"call_{next(ids)}")
    return [piece for part in parts for piece in parser.feed(part)] + parser.finish()


def answer(pieces: list[Piece]) -> dict[str, Any]:
    """The message without what is always there, its calls as pairs of name and arguments."""
    found = message(pieces)
    assert found.pop("role") == "assistant"
    calls = found.pop("tool_calls", [])
    assert [call["id"] for call in calls] == [f"call_{i}" for i in range(len(calls))]
    assert all(call["type"] == "function" for call in calls)
    return {
        key: value
        for key, value in {
            "reasoning": found.get("reasoning_content"),
            "content": found["content"],
            "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        }.items()
        if value
    }


CITY = '{"city": "Zürich 😀"}'
LONGEST = "x" * (512 - len("function" + SEPARATOR))
TWO = [("weather", CITY), ("clock", "{}")]

ANSWERS: dict[str, tuple[ChatFormat, bool | None, str, dict[str, Any]]] = {
    # reasoning
    "the prompt opened it": (
        R1,
        True,
        "Hm.\n</think>\n\nYes.",
        {"reasoning": "Hm.\n", "content": "\n\nYes."},
    ),
    "the prompt opened it and the model does again": (
        R1,
        True,
        "\n<think>\nHm.</think>Yes.",
        {"reasoning": "\nHm.", "content": "Yes."},
    ),
    "the model opens it": (
        R1,
        None,
        "<think>\nHm.\n</think>\nYes.",
        {"reasoning": "\nHm.\n", "content": "\nYes."},
    ),
    "the model does not open it": (
        R1,
        None,
        "\nYes <think>no</think>.",
        {"content": "\nYes <think>no</think>."},
    ),
    "the prompt closed it": (V31, False, "<think>a</think>", {"content": "<think>a</think>"}),
    "it never ends": (R1, True, f"Hm. {CALLS_BEGIN}<think", {"reasoning": f"Hm. {CALLS_BEGIN}<think"}),
    "it ends twice": (R1, True, "a</think>b</think>c", {"reasoning": "a", "content": "b</think>c"}),
    "it is empty": (R1, True, "</think>Yes", {"content": "Yes"}),
    "a part of its end": (R1, True, "a</thin", {"reasoning": "a</thin"}),
    "nothing but a part of its beginning": (R1, None, " <thi", {"content": " <thi"}),
    # calls
    "v3, one": (V3, False, CALLS_BEGIN + v3("weather", CITY) + CALLS_END, {"calls": TWO[:1]}),
    "v3, two": (
        V3,
        False,
        CALLS_BEGIN + "\n".join(v3(*call) for call in TWO) + CALLS_END,
        {"calls": TWO},
    ),
    "v3.1, two": (
        V31,
        False,
        CALLS_BEGIN + "".join(v31(*call) for call in TWO) + CALLS_END,
        {"calls": TWO},
    ),
    "behind reasoning": (
        R1,
        True,
        f"Call!</think>\n\n{CALLS_BEGIN}{v3(*TWO[0])}{CALLS_END}\n",
        {"reasoning": "Call!", "calls": TWO[:1]},
    ),
    "behind text": (
        V31,
        False,
        f"Looking.\n{CALLS_BEGIN}{v31(*TWO[0])}{CALLS_END}",
        {"content": "Looking.\n", "calls": TWO[:1]},
    ),
    "text after and between": (
        V31,
        False,
        f"a{CALLS_BEGIN}{v31(*TWO[0])} b {v31(*TWO[1])}{CALLS_END}\nc\n",
        {"content": "a b \nc\n", "calls": TWO},
    ),
    "without the outer markers": (V31, False, "".join(v31(*call) for call in TWO), {"calls": TWO}),
    "v3, without its end": (
        V3,
        False,
        CALLS_BEGIN + v3(*TWO[0]).removesuffix(CALL_END) + CALLS_END + EOS,
        {"content": EOS, "calls": TWO[:1]},
    ),
    "v3, the next one ends it": (
        V3,
        False,
        v3(*TWO[0]).removesuffix(CALL_END) + "\n" + v3(*TWO[1]),
        {"calls": TWO},
    ),
    "v3, without a fence": (
        V3,
        False,
        f"{CALL_BEGIN}function{SEPARATOR}weather\n{CITY}\n{CALL_END}",
        {"calls": TWO[:1]},
    ),
    "v3, without line breaks": (
        V3,
        False,
        f"{CALL_BEGIN}function{SEPARATOR} weather ```json{CITY}```{CALL_END}",
        {"calls": TWO[:1]},
    ),
    "v3, without a type": (V3, False, v31(*TWO[0]), {"calls": TWO[:1]}),
    "v3, without arguments": (
        V3,
        False,
        f"{CALL_BEGIN}function{SEPARATOR}clock{CALL_END}{v3('clock', '')}",
        {"calls": [("clock", ""), ("clock", "")]},
    ),
    "v3.1, with a fence": (V31, False, v31("weather", f"\n```json\n{CITY}\n```\n"), {"calls": TWO[:1]}),
    "v3.1, a tool named function": (V31, False, v31("function", "{}"), {"calls": [("function", "{}")]}),
    "a fence in the arguments": (
        V3,
        False,
        v3("weather", '{"code": "```json"}') + v3("clock", '{"x": "`"}'),
        {"calls": [("weather", '{"code": "```json"}'), ("clock", '{"x": "`"}')]},
    ),
    "indented arguments": (
        V31,
        False,
        v31("weather", '{\n  "city": "Ulm"\n}\n'),
        {"calls": [("weather", '{\n  "city": "Ulm"\n}')]},
    ),
    # what is not as it should be
    "an unknown tool": (V31, False, v31("no such tool", "{}"), {"calls": [("no such tool", "{}")]}),
    "no JSON": (V31, False, v31("weather", "city=Ulm"), {"calls": [("weather", "city=Ulm")]}),
    "cut in a string": (
        V3,
        False,
        v3("weather", "").partition("\n\n")[0] + '\n{"city": "Ulm ',
        {"calls": [("weather", '{"city": "Ulm ')]},
    ),
    "cut in the last fence": (
        V3,
        False,
        v3(*TWO[0]).removesuffix(f"`{CALL_END}"),
        {"calls": [("weather", CITY + "\n``")]},
    ),
    "cut after the last fence": (V3, False, v3(*TWO[0]).removesuffix(CALL_END), {"calls": TWO[:1]}),
    "cut in the last marker": (V31, False, v31(*TWO[0])[:-3], {"calls": [("weather", CITY + CALL_END[:-3])]}),
    "cut in a name": (
        V3,
        False,
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}weat",
        {"content": f"{CALL_BEGIN}function{SEPARATOR}weat"},
    ),
    "cut in the first marker": (V31, False, f"a {CALLS_BEGIN[:9]}", {"content": f"a {CALLS_BEGIN[:9]}"}),
    "no name": (V31, False, v31(" ", "{}"), {"content": v31(" ", "{}")}),
    "v3, no name": (V3, False, v3("", "{}"), {"content": v3("", "{}")}),
    "no separator": (
        V31,
        False,
        f"{CALL_BEGIN}weather{CITY}{CALL_END}{v31(*TWO[1])}",
        {"content": f"{CALL_BEGIN}weather{CITY}{CALL_END}", "calls": TWO[1:]},
    ),
    "an endless name": (
        V31,
        False,
        CALL_BEGIN + "x" * 600 + v31(*TWO[1]),
        {"content": CALL_BEGIN + "x" * 600, "calls": TWO[1:]},
    ),
    "v3, the longest name": (
        V3,
        False,
        f"{CALL_BEGIN}function{SEPARATOR}{LONGEST}{CALL_END}",
        {"calls": [(LONGEST, "")]},
    ),
    "markers of nothing": (
        V31,
        False,
        f"a{CALLS_BEGIN}\n{CALLS_END}b{SEPARATOR}",
        {"content": f"ab{SEPARATOR}"},
    ),
    "only white space": (V31, False, " \n", {"content": " \n"}),
    "nothing": (V31, None, "", {}),
}


@pytest.mark.parametrize("cut", ["whole", "characters", "tokens"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_its_pieces(name, cut):
    form, thinking, text, expected = ANSWERS[name]
    tokens = [part for part in re.split("(" + "|".join(map(re.escape, MARKERS)) + "|\\s)", text) if part]
    parts = {"whole": [text], "characters": list(text), "tokens": tokens}[cut]
    assert answer(parsed(form, thinking, parts)) == expected


FRAGMENTS = st.one_of(
    st.sampled_from([*MARKERS, *(marker[:-1] for marker in MARKERS), "<", "<｜", "｜>"]),
    st.sampled_from(
        ["function", "weather", "```json\n", "\n```", "```", "`", "\n", " ", "\n\n", '{"a": 1}', "{"]
    ),
    st.integers(10, 99).map(lambda number: f"[{number}]"),
    st.sampled_from([v3("weather", CITY), v31("clock", "{}"), " " * 70, "`" * 70, "x" * 500, "y" * 70]),
)


@settings(max_examples=250, deadline=None)
@given(
    st.lists(FRAGMENTS, max_size=14).map("".join),
    st.sampled_from([V3, R1, V31]),
    st.sampled_from([True, None, False]),
    st.booleans(),
    st.data(),
)
def test_no_cut_of_the_text_changes_the_answer(text, form, thinking, tools, data):
    thinking = thinking if form.reasons else False
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = message(parsed(form, thinking, [text], tools=tools))
    assert message(parsed(form, thinking, parts, tools=tools)) == whole
    assert message(parsed(form, thinking, list(text), tools=tools)) == whole


@settings(max_examples=100, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map("".join), st.sampled_from([V3, R1, V31]), st.booleans())
def test_no_word_of_an_answer_is_lost_or_told_twice(text, form, thinking):
    told = json.dumps(message(parsed(form, thinking and form.reasons, [text])), ensure_ascii=False)
    word = re.compile(r"\[\d\d\]")
    assert sorted(word.findall(told)) == sorted(word.findall(text))


@given(st.text(max_size=40), st.lists(FRAGMENTS, max_size=5).map("".join))
def test_without_tools_and_reasoning_all_text_is_content(some, more):
    text = some + more
    assert parsed(V3, False, [text], tools=False) == ([Content(text)] if text else [])


def test_pieces_come_as_soon_as_they_are_certain():
    parser = ChatParser(R1, tools=True, thinking=True, new_id=lambda: "call_x")
    told = [
        ("Hm", [Reasoning("Hm")]),
        (".</", [Reasoning(".")]),
        ("think>Look", [Content("Look")]),
        ("ing. <｜tool", [Content("ing. ")]),
        ("▁calls▁begin｜>", []),
        (f"{CALL_BEGIN}function", []),
        (f"{SEPARATOR}weather", []),
        ("\n", [ToolCall(0, "call_x", "weather")]),
        ('```json\n{"ci', [ToolArguments(0, '{"ci')]),
        ('ty": "Ulm"}\n', [ToolArguments(0, 'ty": "Ulm"}')]),
        (f"```{CALL_END}\n{v3('clock', '{}')}", [ToolCall(1, "call_x", "clock"), ToolArguments(1, "{}")]),
        (CALLS_END, []),
    ]
    for text, pieces in told:
        assert parser.feed(text) == pieces, text
    assert parser.finish() == []
    assert parser.has_called


@pytest.mark.parametrize("part", ["\n", "`", "<", "x"])
@pytest.mark.parametrize(
    "start",
    [
        "<think>",
        "Yes",
        f"{CALL_BEGIN}x",
        f"{CALL_BEGIN}clock{SEPARATOR}{{",
        f"{CALL_BEGIN}clock{SEPARATOR}```json\n{{",
    ],
)
def test_little_is_held_back_and_not_for_long(start, part):
    """So a step's cost does not grow with the answer, and a client sees a text while it comes."""
    parser = ChatParser(V31, tools=True, thinking=None)
    told = parser.feed(start) + [piece for _ in range(2000) for piece in parser.feed(part)]
    text = "".join(piece.text for piece in told if not isinstance(piece, ToolCall))
    assert len(text) >= 2000 - 64
    assert set(text[10:]) <= {part, *start}


def test_ids_of_calls_are_random():
    pieces = [ChatParser.of(V31, tools=[CLOCK], thinking=False).feed(v31("clock", "{}"))[0] for _ in range(2)]
    assert all(
        isinstance(piece, ToolCall) and re.fullmatch(r"call_[0-9a-f]{24}", piece.id) for piece in pieces
    )
    assert pieces[0] != pieces[1]


@pytest.mark.parametrize("options", [{"tools": []}, {"tools": [CLOCK], "tool_choice": "none"}, {}])
def test_calls_are_plain_text_where_there_are_no_tools_to_call(options):
    parser = ChatParser.of(V31, thinking=False, **options)
    assert parser.feed(v31("clock", "{}")) == [Content(v31("clock", "{}"))]
    assert not parser.has_called


def test_a_template_without_reasoning_has_no_reasoning():
    assert ChatParser.of(V3, thinking=True).feed("<think>") == [Content("<think>")]


def test_the_bodies_of_an_answer_and_of_a_stream_say_the_same():
    pieces = parsed(V31, None, ["<think>Hm</think>Yes", CALLS_BEGIN + v31("clock", '{"a": 1}')])
    call = {"id": "call_0", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    assert message(pieces) == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Hm",
        "tool_calls": [call],
    }
    assert [delta(piece) for piece in pieces] == [
        {"reasoning_content": "Hm"},
        {"content": "Yes"},
        {"tool_calls": [{"index": 0} | call | {"function": {"name": "clock", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
    ]
    assert message([]) == {"role": "assistant", "content": ""}
    assert message(pieces[2:])["content"] is None


# ---- what goes in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_tells_its_format(name):
    assert ChatFormat.of(Template.named(name)) == FORMATS[name]


def test_a_template_without_calls_or_none_at_all_has_no_format():
    assert ChatFormat.of(Template("{% for m in messages %}{{ m.content }}{% endfor %}")) == ChatFormat()
    assert ChatFormat.of(Template("{{ raise('never') }}")) == ChatFormat()


def test_the_tokenizer_of_a_checkpoint_tells_its_format(tmp_path):
    tokenizer = Tokenizer(
        write_tokenizer(tmp_path, chat_template=(TEMPLATES / "v31.jinja").read_text("utf-8"))
    )
    form = ChatFormat.of(tokenizer)
    assert form == V31
    prompt = form.prompt(tokenizer, [{"role": "user", "content": "Hi"}], [CLOCK], thinking=True)
    assert prompt.endswith(f"{USER}Hi{ASSISTANT}<think>")
    assert "### clock" in prompt


@pytest.mark.parametrize(
    ("name", "options", "thinking"),
    [
        ("v3-first", {}, False),
        ("r1", {}, True),
        ("r1", {"opens_itself": True}, None),
        ("v31", {}, False),
        ("v31", {"thinking": True}, True),
        ("v31-tools", {}, False),
    ],
)
def test_the_prompt_says_whether_the_answer_begins_with_reasoning(name, options, thinking):
    template = Template.named(name)
    prompt = FORMATS[name].prompt(template, [{"role": "user", "content": "<think>"}], **options)
    assert FORMATS[name].thinking(prompt) is thinking


def test_an_answer_to_tool_results_may_begin_with_reasoning():
    assert R1.thinking(f"{OUTPUTS[0]}...{OUTPUTS[1]}") is None


def asked(id_: str, name: str, arguments: str = '{"city": "Ulm"}') -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [asked("a", "weather"), asked("b", "clock", "{}")],
    },
    {"role": "tool", "content": "12:00", "tool_call_id": "b"},
    {"role": "tool", "content": "Sunny.", "tool_call_id": "a"},
    {"role": "assistant", "content": "Sunny at noon."},
    {"role": "user", "content": "And then?"},
]

RESULTS = "Sunny.", "12:00"
IN_V3 = (
    CALLS_BEGIN
    + v3("weather", '{"city": "Ulm"}')
    + "\n"
    + v3("clock", "{}")
    + f"{CALLS_END}{EOS}{OUTPUTS[0]}{OUTPUT[0]}Sunny.{OUTPUT[1]}\n{OUTPUT[0]}12:00{OUTPUT[1]}{OUTPUTS[1]}"
    + f"Sunny at noon.{EOS}{USER}And then?{ASSISTANT}"
)
IN_V31 = (
    CALLS_BEGIN
    + v31("weather", '{"city": "Ulm"}')
    + v31("clock", "{}")
    + f"{CALLS_END}{EOS}{OUTPUT[0]}Sunny.{OUTPUT[1]}{OUTPUT[0]}12:00{OUTPUT[1]}Sunny at noon.{EOS}"
    + f"{USER}And then?{ASSISTANT}"
)
PROMPTS = {
    "v3-first": f"{BOS}Be brief.{USER}Weather?{ASSISTANT}{IN_V3}",
    "r1": f"{BOS}Be brief.{USER}Weather?{ASSISTANT}{IN_V3}<think>\n",
    "v31": f"{BOS}Be brief.{USER}Weather?{ASSISTANT}</think>{IN_V31}</think>",
    "v31-tools": f"{BOS}Be brief.{USER}Weather?{ASSISTANT}{IN_V31}",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_chat_with_calls_and_results_is_rendered(name):
    """Reasoning stays out, and the results stand in the order of the calls, for they show no ids."""
    assert FORMATS[name].prompt(Template.named(name), CHAT) == PROMPTS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_text_beside_calls_is_rendered(name):
    chat = [CHAT[1], CHAT[2] | {"content": "Looking."}, *CHAT[3:5]]
    prompt = FORMATS[name].prompt(Template.named(name), chat)
    assert prompt.index("Looking.") < prompt.index(CALLS_BEGIN) < prompt.index("Sunny.")


def test_arguments_that_are_no_json_are_rendered_as_they_are():
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [asked("a", "weather", '{"city')]}]
    assert v31("weather", '{"city') in V31.prompt(Template.named("v31"), chat)
    assert v31("weather", '"{\\"city"') in V31_TOOLS.prompt(Template.named("v31-tools"), chat)


def test_results_without_a_call_keep_their_place():
    chat = [{"role": "tool", "content": text, "tool_call_id": text} for text in "cab"]
    assert [each["content"] for each in V31.messages([*chat, CHAT[1]])] == ["c", "a", "b", "Weather?"]
    assert V31.messages([{"role": "function", "name": "f", "content": "x"}])[0]["role"] == "tool"


def test_a_call_of_the_older_api_is_rendered():
    call = {"role": "assistant", "content": None, "function_call": asked("", "clock", "{}")["function"]}
    chat = [CHAT[1], call, {"role": "function", "name": "clock", "content": "12:00"}]
    prompt = V31.prompt(Template.named("v31"), chat)
    assert f"{v31('clock', '{}')}{CALLS_END}{EOS}{OUTPUT[0]}12:00{OUTPUT[1]}" in prompt


def test_a_template_that_takes_tools_gets_them_with_every_field_but_strict():
    prompt = V31_TOOLS.prompt(Template.named("v31-tools"), CHAT[1:2], [WEATHER, CLOCK])
    schema = json.dumps(WEATHER["function"]["parameters"])
    empty = '{"type": "object", "properties": {}}'
    assert f"{BOS}\n### weather\nWeather of a city.\n{schema}\n### clock\n\n{empty}{USER}Weather?" in prompt


@pytest.mark.parametrize("name", ["v3-first", "r1", "v31"])
@pytest.mark.parametrize("systems", [[], ["Be brief."], ["Be kind.", "Be brief."]])
def test_the_server_describes_the_tools_where_the_template_does_not(name, systems):
    """Behind the last system message, since the first release's template shows no other."""
    form = FORMATS[name]
    chat = [*({"role": "system", "content": text} for text in systems), CHAT[1]]
    prompt = form.prompt(Template.named(name), chat, [WEATHER, CLOCK], "auto")
    system = prompt.removeprefix(BOS).partition(USER)[0]
    begin, end = form.call_ends("TOOL_NAME")
    assert json.dumps(WEATHER["function"]["parameters"]) in system
    assert f"{CALLS_BEGIN}{begin}ARGUMENTS{end}{CALLS_END}" in system
    assert system.index("### weather") < system.index("### clock")
    assert ("Be brief.\n\n## Tools" in system) == bool(systems)


def test_tools_are_not_shown_where_none_may_be_called():
    chat, template = CHAT[1:2], Template.named("v31")
    assert V31.prompt(template, chat, [CLOCK], "none") == V31.prompt(template, chat)


def test_a_template_without_calls_refuses_tools():
    template = Template("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="no form for tool calls") as refused:
        ChatFormat().prompt(template, CHAT[1:2], [CLOCK])
    assert refused.value.field == "tools"
    assert ChatFormat().prompt(template, CHAT[1:2], [CLOCK], "none") == "Weather?"
    with pytest.raises(RequestError):
        call_grammar([CLOCK], "required", ChatFormat())


# ---- what the answer must be ------------------------------------------------------------------------------


def sample(form: dict[str, Any], take: int) -> str:
    """One text of a structural tag; `take` chooses among alternatives, and how many of a list."""
    match form["type"]:
        case "sequence":
            return "".join(sample(each, take) for each in form["elements"])
        case "tag":
            return form["begin"] + sample(form["content"], take) + form["end"]
        case "tags_with_separator":
            count = 1 if form["stop_after_first"] else 2
            tags = form["tags"]
            return form["separator"].join(sample(tags[(take + i) % len(tags)], take) for i in range(count))
        case "triggered_tags":
            return "Free. " + sample(form["tags"][0], take)
        case "json_schema":
            return json.dumps({name: "x" for name in form["json_schema"].get("required", [])})
        case "optional":
            return sample(form["content"], take) if take else ""
        case "any_text":
            return "Hm."
        case "regex":
            assert form["pattern"] == "\\n{0,2}"
            return "\n" * take
        case kind:
            raise AssertionError(kind)


def tag(grammar: Grammar | None) -> dict[str, Any]:
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.text)["format"]


NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize("take", [0, 1])
@pytest.mark.parametrize("thinking", [False, True, None])
@pytest.mark.parametrize("form", [R1, V31], ids=["v3", "v3.1"])
@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ("required", True, ["weather", "clock"]),
        ("required", False, ["weather"]),
        (NAMED, True, ["clock"]),
        ("auto", True, ["weather", "clock"]),
        (None, False, ["weather"]),
    ],
)
def test_what_a_choice_allows_parses_as_calls_of_it(choice, parallel, names, form, thinking, take):
    grammar = tag(call_grammar([WEATHER, CLOCK], choice, form, thinking=thinking, parallel=parallel))
    text = sample(grammar, take)
    found = answer(parsed(form, thinking, [text]))
    arguments = {"weather": '{"city": "x"}', "clock": "{}"}
    names = names[::-1] if take and len(names) > 1 else ["clock"] if take else names
    assert found["calls"] == [(name, arguments[name]) for name in names]
    assert ("reasoning" in found) == (thinking is True or (thinking is None and take == 1))
    assert found.get("content", "").strip() == ("Free." if choice in ("auto", None) else "")


VOCABULARY = (*(bytes([byte]) for byte in range(256)), *(marker.encode() for marker in MARKERS), b"")
END = len(VOCABULARY) - 1
SPLIT = re.compile("|".join([*map(re.escape, MARKERS), "(?s:.)"]))


def tokens_of(text: str) -> list[int]:
    """Markers as one token each, the rest as bytes."""
    parts = (part.encode() for part in SPLIT.findall(text))
    return [token for part in parts for token in ([VOCABULARY.index(part)] if part in VOCABULARY else part)]


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether the engine lets an answer be `text` and end there."""
    assert grammar is not None
    vocabulary = Vocabulary(VOCABULARY, frozenset({END}), tokens_of)
    matcher = Grammars(lambda: vocabulary).compile(grammar).matcher()
    mask = torch.zeros(1, mask_words(len(VOCABULARY)), dtype=torch.int32)
    matcher.advance(tokens_of(text))
    if matcher.error is None:
        matcher.fill([0], [-1], mask)
    return bool(mask[0, END // 32] >> (END % 32) & 1)


@pytest.mark.parametrize("form", [R1, V31], ids=["v3", "v3.1"])
@pytest.mark.parametrize(
    ("thinking", "before"), [(False, ""), (True, "a<b</think>\n\n"), (None, "<think></think>")]
)
def test_the_engine_enforces_a_choice(form, thinking, before):
    pytest.importorskip("llguidance")

    def calls(*names: str) -> str:
        arguments = {"weather": '{"city": "Ulm"}', "clock": "{}", "other": "{}"}
        ends = [(form.call_ends(name), arguments[name]) for name in names]
        return (
            CALLS_BEGIN + form.separator.join(begin + given + end for (begin, end), given in ends) + CALLS_END
        )

    tools = [WEATHER, CLOCK]
    answers = ["Yes.", calls("clock"), calls("weather", "clock"), calls("other"), '{"city": "Ulm"}']
    allowed = {
        "required": (False, True, True, False, False),
        "named": (False, True, False, False, False),
        "auto": (True, True, True, False, True),
        "one": (True, True, False, False, True),
        "form": (False, True, True, False, True),
    }
    grammars = {
        "required": call_grammar(tools, "required", form, thinking=thinking),
        "named": call_grammar(tools, NAMED, form, thinking=thinking),
        "auto": call_grammar(tools, "auto", form, thinking=thinking),
        "one": call_grammar(tools, "auto", form, thinking=thinking, parallel=False),
        "form": call_grammar(tools, "auto", form, thinking=thinking, otherwise=Grammar("json")),
    }
    found = {
        name: tuple(accepts(grammar, before + text) for text in answers) for name, grammar in grammars.items()
    }
    assert found == allowed


def test_an_answer_is_calls_or_what_its_form_asks_for():
    form = Grammar("json_schema", '{"type": "integer"}')
    inner = {"type": "json_schema", "json_schema": {"type": "integer"}}
    both = tag(call_grammar([CLOCK], "auto", V31, otherwise=form))
    assert both["type"] == "or"
    assert answer(parsed(V31, False, [sample(both["elements"][0], 0)]))["calls"] == [("clock", "{}")] * 2
    assert both["elements"][1] == inner
    assert tag(call_grammar([CLOCK], None, V31, thinking=True, otherwise=form))["elements"][1]["type"] == "or"
    assert tag(call_grammar([CLOCK], "required", V31, otherwise=form))["type"] == "tag"
    assert call_grammar([CLOCK], "none", V31, otherwise=form) is form
    assert tag(call_grammar([], None, V31, thinking=True, otherwise=form))["elements"][1] == inner


def test_free_calls_need_no_grammar():
    loose = WEATHER | {"function": WEATHER["function"] | {"strict": None}}
    assert call_grammar([loose, CLOCK], "auto", V31) is None
    assert call_grammar([WEATHER], "none", V31) is None
    assert call_grammar([], None, V31) is None


@pytest.mark.parametrize(
    ("choice", "strict", "binds"),
    [
        ("required", None, True),
        ("required", True, True),
        ("required", False, False),
        ("auto", True, True),
        ("auto", None, False),
    ],
)
def test_a_schema_binds_where_it_is_asked_for(choice, strict, binds):
    tool = WEATHER | {"function": WEATHER["function"] | {"strict": strict}}
    text = json.dumps(tag(call_grammar([tool, CLOCK], choice, V31, parallel=False)))
    assert ('"city"' in text) is binds


def test_a_choice_of_an_unknown_tool_is_refused():
    with pytest.raises(RequestError) as refused:
        call_grammar([WEATHER], NAMED, V31)
    assert refused.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("grammar", "inner"),
    [
        (Grammar("json"), {"type": "json_schema", "json_schema": {"type": "object"}}),
        (Grammar("json_schema", "{}"), {"type": "json_schema", "json_schema": {}}),
        (Grammar("regex", "a+"), {"type": "regex", "pattern": "a+"}),
        (Grammar("ebnf", 'root ::= "a"'), {"type": "grammar", "grammar": 'root ::= "a"'}),
    ],
)
def test_a_constraint_leaves_the_reasoning_free(grammar, inner):
    assert behind_reasoning(grammar, False) is grammar
    opened, maybe = tag(behind_reasoning(grammar, True)), tag(behind_reasoning(grammar, None))
    assert opened["elements"][-1] == maybe["elements"][-1] == inner
    assert opened["elements"][0]["elements"][0]["begin"] == ""
    assert maybe["elements"][0]["content"]["elements"][0]["begin"] == "<think>"
    twice = tag(behind_reasoning(behind_reasoning(grammar, True), True))
    assert twice["elements"][-1] == opened


# ---- the schemas of tools --------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, WEATHER["function"]["parameters"], nested(64)])
def test_a_schema_of_parameters_is_taken(schema):
    assert TypeAdapter(Parameters).validate_python(schema, strict=True) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["object"]},
        {"properties": []},
        {"required": "city"},
        {"required": [1]},
        {"description": "x" * 65536},
        nested(65),
        [],
        "{}",
    ],
)
def test_what_cannot_be_a_schema_of_parameters_is_refused(schema):
    with pytest.raises(ValidationError):
        TypeAdapter(Parameters).validate_python(schema, strict=True)
