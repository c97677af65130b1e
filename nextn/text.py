"""Text and tokens: the tokenizer, the text of a growing output, stop strings.

Output text is built from the bytes of each token (byte-level BPE), so a token costs the same however long the
output is, no character is ever split, and the pieces joined are exactly `Tokenizer.decode` of all tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nextn.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


THINK, THINK_END = "<think>", "</think>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (THINK, THINK_END, CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
"""Of reasoning and tool calls. They are text, whether or not the tokenizer calls these tokens special: who
reads the answer tells its parts apart by them."""


class Tokenizer:
    """A checkpoint's byte-level BPE tokenizer and chat template, read from local files only.

    The file tokenizer.json decides how text is split, whatever class tokenizer_config.json names: the class
    that the first DeepSeek-V3 release names, LlamaTokenizerFast, would replace the file's rules by Llama's.
    """

    def __init__(self, path: Path) -> None:
        """Read tokenizer.json and its companions in `path`; raise CheckpointError if that cannot work."""
        if not (path / "tokenizer.json").is_file():
            raise CheckpointError(_no_tokenizer(path))
        settings = _read_json(path / "tokenizer_config.json")
        self._fast = _load(path)
        self._model = self._fast.backend_tokenizer
        self._bytes: dict[int, bytes] = {}
        self._to_byte = _byte_of_character()
        if not _is_byte_level(self._model.decoder):
            raise CheckpointError(f"{path}/tokenizer.json is not a byte-level BPE, the kind that nextn reads")
        self.special_ids: frozenset[int] = frozenset(
            number
            for number, token in self._model.get_added_tokens_decoder().items()
            if token.special and token.content not in MARKERS
        )
        self.bos_token_id: int | None = _token_id(self._fast.bos_token_id)
        adds_bos = settings.get("add_bos_token")
        if adds_bos is None:
            adds_bos = self.bos_token_id in self._model.encode("", add_special_tokens=True).ids
        self._adds_bos = bool(adds_bos) and self.bos_token_id is not None
        self.eos_token_ids: frozenset[int] = _eos_token_ids(path, _token_id(self._fast.eos_token_id))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows."""
        return self._model.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a chat becomes a prompt."""
        return bool(self._fast.chat_template)

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Most bytes of text that one token can stand for; None where tokens may leave text out.

        It comes from the whole vocabulary, which takes a moment when it is asked for the first time.
        """
        added = self._model.get_added_tokens_decoder()
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        keeps_text = (
            self._model.normalizer is None
            and self._model.truncation is None
            and _is_lossless_split(self._model.pre_tokenizer)
            and self._to_byte.keys() <= vocabulary.keys()  # a byte without a token would be dropped
            and not any(token.lstrip or token.rstrip for token in added.values())
        )
        if not keeps_text:
            return None
        lengths = [len(self._bytes_of(name)) for name, number in vocabulary.items() if number not in added]
        return max(lengths + [len(token.content.encode()) for token in added.values()])

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of len(encode(text)) that costs next to nothing; 0 where none can be given."""
        longest = self.longest_token_bytes
        return 0 if longest is None else -(-len(_utf8(text)) // longest)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of `text`, after BOS if the checkpoint asks for it and the text does not begin with it."""
        _utf8(text)
        # Unlike encode, this releases the interpreter's lock: a long text must not hold up the engine.
        tokens: list[int] = self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_special_tokens and self._adds_bos and tokens[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            tokens.insert(0, self.bos_token_id)
        return tokens

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `tokens`: bytes that are not UTF-8 become U+FFFD, numbers that are no token nothing."""
        parts = (self.token_bytes(token, skip_special_tokens) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """Bytes that `token` adds to the text."""
        if skip_special_tokens and token in self.special_ids:
            return b""
        found = self._bytes.get(token)
        if found is None:
            found = self._spell(token)
            if found:  # numbers that are no token have no end
                self._bytes[token] = found
        return found

    def token_text(self, token: int) -> str:
        """One token spelt for people, special ones by name; `bytes:\\xe4\\xb8` for a part of a character."""
        spelt = self.token_bytes(token, skip_special_tokens=False)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def _spell(self, token: int) -> bytes:
        """Undo the byte-level alphabet; a token with characters outside it stands for itself."""
        name = self._model.id_to_token(token) if 0 <= token < 2**32 else None
        return b"" if name is None else self._bytes_of(name)

    def _bytes_of(self, name: str) -> bytes:
        if all(character in self._to_byte for character in name):
            return bytes(self._to_byte[character] for character in name)
        return name.encode()

    @property
    def chat_template(self) -> str:
        """The checkpoint's template, empty if it has none."""
        return str(self._fast.chat_template or "")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **chat_template_kwargs: Any) -> list[int]:
        """Tokens of `chat_text`, which holds its BOS already; raise RequestError as it does."""
        return self.encode(self.chat_text(messages, **chat_template_kwargs), add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt which the checkpoint's template makes of `messages` (role and content each) and `tools`.

        The prompt ends where the assistant's answer begins. The template writes BOS itself. Raise
        RequestError if there is no template, or if the template refuses the messages or the arguments.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        reserved = {
            *("self", "messages", "conversations"),  # the library's and the template's own
            *signature(self._fast.apply_chat_template).parameters,
            *self._fast.special_tokens_map,
        }
        for name in chat_template_kwargs:
            if name in reserved:
                raise RequestError(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **chat_template_kwargs,
            )
        except Exception as error:  # the template is the checkpoint's program and may raise anything
            raise RequestError(f"the model's chat template refused this chat: {error}", "messages") from error
        return str(text)


class Detokenizer:
    """The text of one output, token by token.

    `push` returns only what can be shown for good: complete characters, and nothing that could still become
    one of the stop strings. The first stop string to be completed ends the text (of several completed by the
    same character, the longest), so the result does not depend on how tokens split the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._finders = [_StopFinder(text) for text in sorted(stop, key=len, reverse=True)]
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text; what stood before it has been returned."""

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take the next token; return the text that it makes safe to show (often empty).

        A stop string that this token completes is text like any other unless `may_stop`. One that it begins
        is held back all the same, since a later token may complete it.
        """
        return self._advance(self._utf8.decode(self._tokenizer.token_bytes(token_id)), may_stop)

    def flush(self) -> str:
        """Return the rest of the text, for an output that ended without a stop string."""
        shown = self._advance(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _advance(self, text: str, may_stop: bool = True) -> str:
        if self.stopped is not None:
            return ""
        if not self._finders:
            return text
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [finder for finder in self._finders if finder.feed(character)]
            if complete and may_stop:
                self.stopped, self._held = complete[0].text, ""
                return seen[: end - len(complete[0].text)]
            for finder in complete:
                finder.pass_over()
        keep = len(seen) - max(finder.matched for finder in self._finders)
        self._held = seen[keep:]
        return seen[:keep]


class _StopFinder:
    """Knuth-Morris-Pratt: `matched` is the length of the longest end of the text that begins `text`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # [i]: longest proper border of text[: i + 1]
        border = 0
        for i in range(1, len(text)):
            border = self._step(border, text[i])
            self._fallback[i] = border

    def feed(self, character: str) -> bool:
        """Whether `character` completes the string."""
        self.matched = self._step(self.matched, character)
        return self.matched == len(self.text)

    def pass_over(self) -> None:
        """Go on behind a complete string; its end may begin the next one."""
        self.matched = self._fallback[-1]

    def _step(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)


def _no_tokenizer(path: Path) -> str:
    """What to do about a directory without tokenizer.json; Kimi-K2's ranks do not say how text is split."""
    if (path / "tiktoken.model").is_file():
        return (
            f"{path} has tiktoken.model and no tokenizer.json: that tokenizer needs code of the checkpoint's "
            "own (transformers' trust_remote_code), which nextn never runs; convert it to a tokenizer.json "
            "elsewhere, with transformers' convert_tiktoken_to_fast, and put that file there"
        )
    return f"{path} has no tokenizer.json; copy the checkpoint's tokenizer files there"


def _load(path: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer; the import stands here because it takes seconds."""
    from transformers import PreTrainedTokenizerFast

    try:
        loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            str(path), local_files_only=True
        )
    except Exception as error:  # a bad file raises anything, even tokenizers' bare Exception
        raise CheckpointError(f"the tokenizer files in {path} cannot be read: {error}") from error
    return loaded


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text holds a lone surrogate, which is not a character") from None


def _is_lossless_split(pre_tokenizer: Any) -> bool:
    """Whether the pre-tokenizer of tokenizer.json spells bytes and passes all of them on."""
    if pre_tokenizer is None:
        return False
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state.get("pretokenizers", [state])
    kinds = {step["type"] for step in steps}
    removes = any(step.get("behavior") == "Removed" for step in steps)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"} and not removes


def _is_byte_level(decoder: Any) -> bool:
    """Whether the decoder of tokenizer.json is ByteLevel, alone or as the only step of a sequence."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    return [step["type"] for step in steps] == ["ByteLevel"]


def _eos_token_ids(path: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Union of what config.json, generation_config.json and the tokenizer call end of sequence."""
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("config.json", "generation_config.json"):
        value = _read_json(path / name).get("eos_token_id")
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return frozenset(found)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content


def _token_id(value: Any) -> int | None:
    """transformers types a token id as int, list or None; one special token has one id."""
    return value if isinstance(value, int) else None
