"""Tokenizer, incremental text and stop strings, each against the plain definition on the whole output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nextn.errors import CheckpointError, RequestError
from nextn.text import MARKERS, Detokenizer, Tokenizer
from tests.server.byte_bpe import ASSISTANT, BOS, EOS, PAD, USER, write_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def _show(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[str, str | None]:
    """Push until a stop string ends the text, as the engine does; return all that was shown."""
    detokenizer = Detokenizer(tokenizer, stop)
    shown = ""
    for token in tokens:
        shown += detokenizer.push(token)
        if detokenizer.stopped is not None:
            return shown, detokenizer.stopped
    return shown + detokenizer.flush(), detokenizer.stopped


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition: the first stop string to be complete ends the text; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def _byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """The token that stands for each single byte."""
    singles = {tokenizer.token_bytes(t): t for t in reversed(range(tokenizer.vocab_size))}
    return [singles[bytes([byte])] for byte in range(256)]


@given(st.text())
def test_any_text_survives_encode_and_decode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text.removeprefix(BOS).replace(EOS, "")


@given(st.data())
def test_decode_agrees_with_the_tokenizers_library(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.integers(0, tokenizer.vocab_size + 5)
    tokens = data.draw(st.lists(ids, max_size=30))
    skip = data.draw(st.booleans())
    expected = tokenizer._model.decode(tokens, skip_special_tokens=skip)
    assert tokenizer.decode(tokens, skip_special_tokens=skip) == expected


@given(st.data())
def test_pieces_joined_are_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any tokens at all: halves of characters, broken UTF-8, special tokens, numbers that are no token."""
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    assert _show(tokenizer, tokens) == (tokenizer.decode(tokens), None)


@given(st.text(min_size=1))
def test_no_piece_holds_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    """One token a byte: each prefix shown so far is a prefix of the text, never a replacement character."""
    single = _byte_tokens(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(single[byte])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.flush() == ""


@given(st.text() | st.lists(st.sampled_from(["Speculation", " ", EOS, USER, "é", "😀", "\n"])).map("".join))
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_the_bound_is_met_by_the_longest_token(tokenizer: Tokenizer) -> None:
    longest = max((BOS, EOS, PAD), key=lambda token: len(token.encode()))
    assert tokenizer.longest_token_bytes == len(longest.encode())
    assert tokenizer.fewest_tokens(longest * 9) == len(tokenizer.encode(longest * 9, False)) == 9
    assert tokenizer.fewest_tokens("") == 0
    assert tokenizer.fewest_tokens("a") == 1


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("truncation", {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}),
        ("lstrip", True),
        ("rstrip", True),
        ("pre_tokenizer", {"type": "WhitespaceSplit"}),
        ("behavior", "Removed"),
        ("vocab", "Ġ"),
    ],
)
def test_there_is_no_bound_where_tokens_may_leave_text_out(
    tmp_path: Path, part: str, changed: object
) -> None:
    """Each of these changes makes some text of any length a few tokens."""
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    if part in ("lstrip", "rstrip"):
        content["added_tokens"][1][part] = changed
    elif part == "behavior":
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": changed, "invert": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    elif part == "vocab":
        names = [name for name in content["model"]["vocab"] if changed not in name]
        content["model"] |= {"vocab": {name: i for i, name in enumerate(names)}, "merges": []}
    else:
        content[part] = changed
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.longest_token_bytes is None
    assert tokenizer.fewest_tokens(" " * 1000) == 0


_SMALL = st.text(alphabet="ab", max_size=24) | st.text(alphabet="ab é", max_size=24)
_STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4).map(tuple)


@given(text=_SMALL, stop=_STOPS)
@example(text="aaab!", stop=("aab",))  # the second a must not undo the first
@example(text="xab!", stop=("b", "ab"))  # both end with the same character
@example(text="xabcd", stop=("abcd", "bc"))  # the one that starts later ends first
def test_text_ends_at_the_first_stop_string_however_it_is_split(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...]
) -> None:
    """The tokenizer's own split and one token a byte give the same text, that of the definition."""
    single = _byte_tokens(tokenizer)
    assert _show(tokenizer, [single[b] for b in text.encode()], stop) == _cut(text, stop)
    assert _show(tokenizer, tokenizer.encode(text), stop) == _cut(text, stop)


@given(text=_SMALL, stop=_STOPS)
def test_what_is_held_back_could_still_become_a_stop_string(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...]
) -> None:
    """Text is late by no more than needed: the part held back begins some stop string."""
    single = _byte_tokens(tokenizer)
    detokenizer = Detokenizer(tokenizer, stop)
    shown = seen = ""
    for character in text:
        for byte in character.encode():
            shown += detokenizer.push(single[byte])
        seen += character
        if detokenizer.stopped is not None:
            break
        held = seen[len(shown) :]
        assert held == "" or any(s.startswith(held) for s in stop)


def test_several_stop_strings_in_one_token_end_at_the_first(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one END two ### three", add_special_tokens=False)
    assert _show(tokenizer, tokens, ("###", "END")) == ("one ", "END")


def test_nothing_comes_after_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("b",))
    for token in tokenizer.encode("abc", add_special_tokens=False):
        detokenizer.push(token)
    assert detokenizer.push(tokenizer.encode("z", add_special_tokens=False)[0]) == ""
    assert detokenizer.flush() == ""


def test_flush_shows_the_start_of_a_stop_string_that_never_came(tokenizer: Tokenizer) -> None:
    assert _show(tokenizer, tokenizer.encode("so ##"), ("###",)) == ("so ##", None)


def test_special_tokens_are_not_shown_but_markers_are(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"a<think>b</think>{EOS}")
    assert _show(tokenizer, tokens) == ("a<think>b</think>", None)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"{BOS}a<think>b</think>{EOS}"


def test_bos_goes_first_and_never_twice(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [tokenizer.bos_token_id, *plain]
    assert tokenizer.encode(BOS + "hello") == [tokenizer.bos_token_id, *plain]


def test_bos_is_left_out_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, add_bos_token=False))
    assert tokenizer.encode("hello") == tokenizer.encode("hello", add_special_tokens=False)


def test_chat_is_rendered_with_one_bos_and_no_newlines(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.render_chat(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
        ]
    )
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert text == f"{BOS}Be kind.{USER}Hi{ASSISTANT}Hello{EOS}{USER}Bye{ASSISTANT}"
    assert tokens.count(tokenizer.bos_token_id) == 1


def test_template_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.render_chat([{"role": "user", "content": "Hi"}], thinking=True)
    assert tokenizer.decode(tokens) == f"{USER}Hi{ASSISTANT}<think>"


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "tokenize", "tools", "bos_token", "add_generation_prompt"),
        *("self", "messages", "conversation", "conversations"),
    ],
)
def test_template_arguments_may_not_replace_the_library_s_own(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        tokenizer.render_chat([{"role": "user", "content": "Hi"}], **{name: "x"})
    assert caught.value.field == "chat_template_kwargs"


def test_a_chat_that_the_template_refuses_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="unknown role") as caught:
        tokenizer.render_chat([{"role": "judge", "content": "Hi"}])
    assert caught.value.field == "messages"


def test_a_model_without_template_points_to_completions(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_a_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_eos_ids_are_those_of_tokenizer_config_and_generation_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert Tokenizer(tmp_path).eos_token_ids == {1, 7, 8, 9}


def test_a_directory_without_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_needs_the_checkpoint_s_own_code_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Kimi-K2 ships ranks and a Python file; beside a tokenizer.json they are no matter."""
    (tmp_path / "tiktoken.model").write_text("AA== 0\n")
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('this ran')")
    auto = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto}))
    with pytest.raises(CheckpointError, match=r"own \(.*, which nextn never runs; convert it to a") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    write_tokenizer(tmp_path, auto_map=auto)
    assert Tokenizer(tmp_path).encode("a")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}'])
def test_a_broken_tokenizer_file_is_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["decoder"] = {"type": "ByteFallback"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer(tmp_path)


@given(st.data())
def test_stop_strings_count_only_from_the_token_that_may_stop(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """The definition: of all ends of a stop string, the first that such a token completes."""
    text = data.draw(st.lists(st.sampled_from(["a", "aa", "ab", "é", "b"]), max_size=12).map("".join))
    stop = tuple(data.draw(st.lists(st.sampled_from(["a", "aa", "aba", "bé"]), max_size=2, unique=True)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    first = data.draw(st.integers(0, len(tokens) + 1))
    detokenizer, shown = Detokenizer(tokenizer, stop), ""
    for index, token in enumerate(tokens):
        shown += detokenizer.push(token, may_stop=index >= first)
    shown += detokenizer.flush()
    free = len(b"".join(map(tokenizer.token_bytes, tokens[:first])).decode(errors="ignore"))
    ends = [
        (end, max((s for s in stop if text[:end].endswith(s)), key=len))
        for end in range(free + 1, len(text) + 1)
        if any(text[:end].endswith(s) for s in stop)
    ]
    expected = text[: ends[0][0] - len(ends[0][1])] if ends else text
    assert shown == expected
    assert (detokenizer.stopped is not None) == bool(ends)


def test_tokens_are_spelt_for_people(tokenizer: Tokenizer) -> None:
    single = _byte_tokens(tokenizer)
    assert tokenizer.token_text(single[ord("a")]) == "a"
    assert tokenizer.token_text(single[0xE4]) == "bytes:\\xe4"
    assert tokenizer.token_text(1) == EOS
    assert tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize("marker", sorted(MARKERS))
def test_markers_of_reasoning_and_calls_are_text_even_if_they_are_special(
    tmp_path: Path, marker: str
) -> None:
    """Whoever reads the answer tells its parts apart by them."""
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    known = [token for token in content["added_tokens"] if token["content"] == marker]
    if known:
        known[0]["special"] = True
    else:
        number = max(token["id"] for token in content["added_tokens"]) + 1
        content["added_tokens"].append(content["added_tokens"][0] | {"id": number, "content": marker})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    tokens = tokenizer.encode(f"a{marker}b", add_special_tokens=False)
    assert len(tokens) == 3
    assert tokenizer.decode(tokens) == f"a{marker}b"
