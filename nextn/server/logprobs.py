"""Log-probabilities in OpenAI's two shapes, handed out with the text that their tokens show.

Every generated token has an entry, those of a stop string and the stop token too: as many as usage counts.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nextn.engine.request import Output, TokenLogprobs
from nextn.text import Tokenizer

IMPOSSIBLE = -9999.0
"""What stands for minus infinity, which JSON cannot hold."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of an answer and where its text begins, in characters; a prompt's first has no logprob."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


class Offsets:
    """Where the text of each token of a growing output begins and ends, counted in characters."""

    def __init__(self, tokenizer: Tokenizer | None, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._position = start

    def push(self, token: int, *, skip_special_tokens: bool = True) -> tuple[int, int]:
        """The span of the next token; one that ends within a character ends behind it."""
        start = self._position
        if self._tokenizer is not None:
            data = self._tokenizer.token_bytes(token, skip_special_tokens)
            start += _is_broken(self._utf8.getstate()[0], data)  # behind what stands for the broken one
            self._position += len(self._utf8.decode(data))
        return start, self._position + bool(self._utf8.getstate()[0])


def _is_broken(begun: bytes, data: bytes) -> bool:
    """Whether bytes that begin a character cannot become one with what follows them."""
    try:
        (begun + data[:1]).decode()
    except UnicodeDecodeError as error:
        return bool(begun) and bool(data) and error.reason != "unexpected end of data"
    return False


class ShownTokens:
    """Hands out each token's entry as soon as all of its text has been shown."""

    def __init__(self, tokenizer: Tokenizer | None, start: int = 0) -> None:
        self._offsets = Offsets(tokenizer, start)
        self._held: deque[tuple[Entry, int]] = deque()
        self._shown = start

    def take(self, output: Output) -> list[Entry]:
        """The entries that come with this output's text; with the last one all that are left."""
        for each in output.logprobs:
            start, end = self._offsets.push(each.token_id)
            self._held.append((Entry(each.token_id, each.logprob, each.top, start), end))
        self._shown += len(output.text)
        ready = []
        while self._held and (output.finish_reason is not None or self._held[0][1] <= self._shown):
            ready.append(self._held.popleft()[0])
        return ready


def prompt_entries(
    tokenizer: Tokenizer | None,
    tokens: Sequence[int],
    given: Iterable[TokenLogprobs | None],
    *,
    bare_bos: bool,
) -> list[Entry]:
    """Entries of an echoed prompt; `bare_bos`: its first token is a BOS that is no part of the text."""
    offsets = Offsets(tokenizer)
    entries = []
    for place, (token, each) in enumerate(zip(tokens, given, strict=True)):
        start, _ = offsets.push(token, skip_special_tokens=bare_bos and place == 0)
        logprob, top = (None, ()) if each is None else (each.logprob, each.top)
        entries.append(Entry(token, logprob, top, start))
    return entries


class Spelling:
    """Tokens as clients read them; without a tokenizer by number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """The token's text or name."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def legacy(self, entries: Sequence[Entry]) -> dict[str, list[object]]:
        """The object of /v1/completions: four lists of one length; the chosen token is among the top ones."""
        return {
            "tokens": [self.text(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def chat(self, entries: Sequence[Entry]) -> list[dict[str, object]]:
        """The `content` list of /v1/chat/completions."""
        return [
            self._chat_token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._chat_token(token, logprob) for token, logprob in entry.top]}
            for entry in entries
        ]

    def _alternatives(self, entry: Entry) -> dict[str, float | None] | None:
        if entry.logprob is None:
            return None
        named: dict[str, float | None] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            named.setdefault(self.text(token), _finite(logprob))  # two tokens may be spelt alike
        return named

    def _chat_token(self, token: int, logprob: float | None) -> dict[str, object]:
        data = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else logprob if logprob >= IMPOSSIBLE else IMPOSSIBLE
