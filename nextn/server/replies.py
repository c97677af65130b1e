"""Answers in OpenAI's shapes: what an engine's outputs become, chunk by chunk or whole.

A whole answer is put together from the very chunks that a stream would bring, so both say the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nextn.engine.request import FinishReason, Output
from nextn.engine.stats import Acceptance
from nextn.server.chat import ChatParser, Piece, delta, message
from nextn.server.logprobs import Entry, ShownTokens, Spelling, prompt_entries
from nextn.text import Tokenizer

Chunk = dict[str, Any]
"""One choice's part of a chunk; `finish_reason` is set on its last one and only there."""


class Answer(Protocol):
    """One choice in the making."""

    def opening(self) -> Chunk | None:
        """What a stream says of it before its text, if anything."""

    def take(self, output: Output) -> list[Chunk]:
        """What the next output shows, in order; often nothing."""

    def ending(self, reason: FinishReason) -> Chunk:
        """Its end."""

    def whole(self, chunks: Sequence[Chunk]) -> Chunk:
        """All its chunks as one answer."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its answer."""

    tokens: Sequence[int]
    text: str
    bare_bos: bool


class TextChoice:
    """A choice of /v1/completions. Without `generates` only the echo is asked for (max_tokens 0)."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        *,
        with_logprobs: bool = False,
        echo: Echo | None = None,
        generates: bool = True,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._spelling = Spelling(tokenizer) if with_logprobs else None
        self._echo = echo
        self._shown = ShownTokens(tokenizer, len(echo.text) if echo is not None else 0)
        self._generates = generates

    def opening(self) -> Chunk | None:
        return None

    def take(self, output: Output) -> list[Chunk]:
        text, entries = "", list[Entry]()
        if self._echo is not None:
            text, entries, self._echo = self._echo.text, self._prompt(self._echo, output), None
        if self._generates:
            text += output.text
            entries += self._shown.take(output)
        return [self._chunk(text, entries)] if text or entries else []

    def ending(self, reason: FinishReason) -> Chunk:
        return self._chunk("", ()) | {"finish_reason": reason if self._generates else "length"}

    def whole(self, chunks: Sequence[Chunk]) -> Chunk:
        logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
        joined = {name: [each for part in logprobs for each in part[name]] for name in self._lists()}
        return {
            "index": self._index,
            "text": "".join(chunk["text"] for chunk in chunks),
            "logprobs": joined or None,
            "finish_reason": chunks[-1]["finish_reason"],
        }

    def _lists(self) -> Iterable[str]:
        return () if self._spelling is None else self._spelling.legacy(()).keys()

    def _prompt(self, echo: Echo, output: Output) -> list[Entry]:
        if output.prompt_logprobs is None:
            return []
        return prompt_entries(self._tokenizer, echo.tokens, output.prompt_logprobs, bare_bos=echo.bare_bos)

    def _chunk(self, text: str, entries: Sequence[Entry]) -> Chunk:
        logprobs = self._spelling.legacy(entries) if self._spelling is not None and entries else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}


class ChatChoice:
    """A choice of /v1/chat/completions; `parser` tells reasoning, text and tool calls apart."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        parser: ChatParser,
        *,
        with_logprobs: bool = False,
        may_call: bool = False,
    ) -> None:
        self._index = index
        self._may_call = may_call
        self._spelling = Spelling(tokenizer) if with_logprobs else None
        self._shown = ShownTokens(tokenizer)
        self._parser = parser
        self._waiting: list[Entry] = []  # entries whose text the parser keeps
        self._pieces: list[Piece] = []

    def opening(self) -> Chunk | None:
        # What a client puts together from calls alone then has no content, as the whole answer has none.
        return self._chunk({"role": "assistant", "content": None if self._may_call else ""})

    def take(self, output: Output) -> list[Chunk]:
        pieces = self._parser.feed(output.text) if output.text else []
        if output.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        self._pieces += pieces
        chunks = [self._chunk(delta(piece)) for piece in pieces]
        if self._spelling is None:
            return chunks
        self._waiting += self._shown.take(output)
        if self._waiting and not chunks and output.finish_reason is not None:
            chunks = [self._chunk({})]
        if self._waiting and chunks:
            content = self._spelling.chat(self._waiting)
            chunks[-1]["logprobs"] = {"content": content, "refusal": None}
            self._waiting.clear()
        return chunks

    def ending(self, reason: FinishReason) -> Chunk:
        called = self._parser.has_called and reason == "stop"
        return self._chunk({}) | {"finish_reason": "tool_calls" if called else reason}

    def whole(self, chunks: Sequence[Chunk]) -> Chunk:
        parts = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"] is not None]
        logprobs = {"content": [each for part in parts for each in part], "refusal": None}
        return {
            "index": self._index,
            "message": message(self._pieces),
            "logprobs": None if self._spelling is None else logprobs,
            "finish_reason": chunks[-1]["finish_reason"],
        }

    def _chunk(self, content: Chunk) -> Chunk:
        return {"index": self._index, "delta": content, "logprobs": None, "finish_reason": None}


class Usage:
    """Token counts of a request, summed over its choices; each prompt counts once, whatever its choices.

    prompt_tokens: of all prompts. per_prompt: choices of each.
    """

    def __init__(
        self, prompt_tokens: int, per_prompt: int, *, with_speculation: bool, counts_completion: bool = True
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._per_prompt = per_prompt
        self._with_speculation = with_speculation
        self._counts_completion = counts_completion
        self._last: dict[int, Output] = {}

    def record(self, index: int, output: Output) -> None:
        """Take the counts of a choice as of this output."""
        self._last[index] = output

    def body(self) -> dict[str, object]:
        """OpenAI's usage object."""
        firsts = [output for index, output in self._last.items() if index % self._per_prompt == 0]
        prompt = self._prompt_tokens
        completion = sum(output.completion_tokens for output in self._last.values())
        completion *= self._counts_completion
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)},
        }

    def final_body(self) -> dict[str, object]:
        """The same when all choices have ended, with what speculation did if that was asked for."""
        if not self._with_speculation:
            return self.body()
        total = Acceptance()
        for output in self._last.values():
            total.merge(output.acceptance)
        speculation = {
            "cycles": total.cycles,
            "drafted_tokens": total.drafted,
            "accepted_tokens": total.emitted - total.cycles,
            "accepted_by_position": total.accepted_by_position,
            "acceptance_length": round(total.length, 3),
        }
        return self.body() | {"speculation": speculation}


class Reply:
    """The answer to one body: its head, its choices and its usage.

    field_name: from the engine's name of a field to the body's.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        choices: Sequence[Answer],
        usage: Usage,
        field_name: Callable[[str], str | None],
    ) -> None:
        self.choices = choices
        self.field_name = field_name
        self.usage = usage
        self._chat = kind == "chat"
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Iterable[Chunk]) -> dict[str, object]:
        """Body of an answer that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self._head | {"object": kind, "choices": list(choices), "usage": self.usage.final_body()}

    def chunk(self, choices: Iterable[Chunk]) -> dict[str, object]:
        """One chunk of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._head | {"object": kind, "choices": list(choices)}
