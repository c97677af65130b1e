"""A request as the engine sees it: token ids in, token ids and text out, one final output at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from nextn.engine.stats import Acceptance
from nextn.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    The defaults stand for themselves: a checkpoint's generation_config.json sets defaults in the server only.
    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch the filters off. A seed of None is drawn by
    the engine. The order is penalties, temperature, min_p, top_k, top_p.
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

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", *(("seed",) if self.seed is not None else ())):
            if not isinstance(getattr(self, name), int):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be a whole number", name)
        for name in ("stop", "stop_token_ids"):
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
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken", "stop"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise RequestError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")

    @property
    def needs_penalties(self) -> bool:
        """Whether counts of earlier tokens change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1.0

    @property
    def needs_filters(self) -> bool:
        """Whether min_p, top_k or top_p may remove tokens (never at temperature 0)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0)


def _in_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Refuse NaN and anything outside [low, high], or (low, high] when `above`."""
    if not (low < value if above else low <= value) or not value <= high:
        bound = f"above {low}" if above else f"at least {low}"
        limit = "" if math.isinf(high) else f" and at most {high}"
        raise RequestError(f"{name} is {value}; it must be {bound}{limit}", name)


@dataclass(slots=True)
class Request:
    """One request on its way through the engine; the engine alone changes it."""

    request_id: str
    prompt_tokens: list[int]
    params: SamplingParams
    output_tokens: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought for one request. `finish_reason` is set on the last output and only there.

    text: the new text that is safe to show (complete UTF-8, no part of a stop string).
    token_ids: the new tokens. stop_reason: the stop string or token id that ended the request.
    error: the message, when finish_reason is 'error'. acceptance: the request's own counter, which
    goes on counting until the last output.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
