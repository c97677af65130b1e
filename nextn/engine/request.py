"""A request as the engine sees it: token ids in, token ids and text out, one final output at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from nextn.engine.grammar import CompiledGrammar, Grammar
from nextn.engine.stats import Acceptance
from nextn.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorKind = Literal["logits", "grammar"]
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_BIASES = 300
"""Tokens in one logit_bias, as OpenAI documents it."""
MAX_BANNED = 32
"""Stop token ids, EOS included, that min_tokens can hold back."""
MAX_LOGPROBS = 20
"""As in kernels.ref.sampling, whose torch this file does without."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    The defaults stand for themselves: nothing takes others from a checkpoint's generation_config.json.
    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch the filters off. A seed of None is drawn by
    the engine. The order is grammar and min_tokens, penalties, logit_bias, temperature, min_p, top_k, top_p.

    logit_bias: what is added to the logits of single tokens, at most 300. min_tokens: before the output has
    so many tokens, EOS (unless ignore_eos) and stop_token_ids are impossible and stop strings are not looked
    for. logprobs: how many of the likeliest tokens to report beside each chosen one's log-probability, 0 for
    that one alone, of the distribution that was sampled from, or with raw_logprobs of the model's own.
    Tokens that filters, bans or a grammar made impossible are not among them. prompt_logprobs: the same for
    the prompt's tokens, always the model's own. grammar: what the text must match.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    raw_logprobs: bool = False
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        optional = [n for n in ("seed", "logprobs", "prompt_logprobs") if getattr(self, n) is not None]
        for name in ("max_tokens", "top_k", "min_tokens", *optional):
            if not isinstance(getattr(self, name), int):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be a whole number", name)
        for name in ("stop", "stop_token_ids", "logit_bias"):
            if not isinstance(getattr(self, name), tuple):
                raise RequestError(f"{name} must be a tuple, even of one element", name)
        _in_range("max_tokens", self.max_tokens, 1, math.inf)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, above=True)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _in_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._check_bias()
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken", "stop"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise RequestError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(
                f"logit_bias names {len(self.logit_bias)} tokens; at most {MAX_BIASES} are taken",
                "logit_bias",
            )
        for token, bias in self.logit_bias:
            if not isinstance(token, int) or token < 0:
                raise RequestError(f"logit_bias has {token!r}, which is no token id", "logit_bias")
            _in_range("logit_bias", bias, -100.0, 100.0)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias names a token twice", "logit_bias")

    @property
    def needs_penalties(self) -> bool:
        """Whether counts of earlier tokens change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1.0

    @property
    def needs_filters(self) -> bool:
        """Whether min_p, top_k or top_p may remove tokens (never at temperature 0)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0)

    @property
    def needs_bias(self) -> bool:
        """Whether single tokens are biased, or banned for a while."""
        return bool(self.logit_bias) or self.min_tokens > 0


def _in_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Refuse NaN and anything outside [low, high], or (low, high] when `above`."""
    if not (low < value if above else low <= value) or not value <= high:
        bound = f"above {low}" if above else f"at least {low}"
        limit = "" if math.isinf(high) else f" and at most {high}"
        raise RequestError(f"{name} is {value}; it must be {bound}{limit}", name)


@dataclass(slots=True)
class Request:
    """One request on its way through the engine; the engine alone changes it.

    choice: which of a prompt's answers this is; it separates their noise under one seed. priority: lower ones
    start first and are preempted last. cache_salt: prefixes are shared among requests of one salt only, so
    that nobody else learns from the time to a first token what they hold. compiled: what `Engine.validate`
    returned, where it was asked before. is_checked: whether `Engine.check` has been, which reads the whole
    prompt. prompt_logprobs: what prefill has computed of them so far; a request that is preempted keeps it.
    """

    request_id: str
    prompt_tokens: list[int]
    params: SamplingParams
    choice: int = 0
    priority: int = 0
    cache_salt: str | None = None
    compiled: CompiledGrammar | None = None
    is_checked: bool = False
    output_tokens: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of the output so far."""
        return len(self.prompt_tokens) + len(self.output_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability, and those of the most likely ones in its place, best first.

    The values are rounded to float32, by which the best are ordered, ties to the lower id. Impossible tokens
    are left out of `top`, so it may be shorter than what was asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought for one request. `finish_reason` is set on the last output and only there.

    text: the new text that is safe to show (complete UTF-8, no part of a stop string).
    token_ids: the new tokens. stop_reason: the stop string or token id that ended the request.
    error: the message, when finish_reason is 'error'; error_kind: 'logits' where none was finite, 'grammar'
    where it allows no further token; error_field: the request's field at fault, if one is. acceptance: the
    request's own counter, which goes on counting until the last output. logprobs: one for each of token_ids,
    when asked for. prompt_logprobs: one for each prompt token, on the first output, when asked for; the first
    token's is None. cached_tokens: prompt tokens that the request found in the prefix cache when it first
    started.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    error_field: str | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
