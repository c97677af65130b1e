"""Requests as a busy server gets them, from a seed: shared prefixes, conversations, every option, aborts."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.load import LogNormal
from nextn.engine.bench import random_tokens
from nextn.engine.engine import Engine
from nextn.engine.grammar import Grammar
from nextn.engine.request import Request, SamplingParams
from nextn.text import Tokenizer

NUMBERS = r"[0-9]{1,3}(, [0-9]{1,3}){0,5}"
OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "filters": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "repetition": {"repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.6, "logprobs": 5},
    "raw logprobs": {"logprobs": 0, "raw_logprobs": True},
    "prompt logprobs": {"prompt_logprobs": 2},
    "every option": {
        "temperature": 0.9, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.05,
        "logit_bias": ((7, -2.0), (9, 1.5)), "logprobs": 20,
    },
}  # fmt: skip
GRAMMARS = {"numbers": Grammar("regex", NUMBERS), "object": Grammar("json_schema", OBJECT)}
GRAMMAR_TOKENS = 32
"""Fewest tokens of an answer with a grammar, so that one can end; every prompt leaves room for them."""
FAMILIES = 6
TENANTS = 3


@dataclass(slots=True)
class Plan:
    """One request to come, and how it is to end.

    abort_after: tokens after which it is aborted, 0 as soon as it is queued; None if it may go on to its end.
    """

    request: Request
    option: str
    abort_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    was_aborted: bool = False

    @property
    def is_to_be_aborted(self) -> bool:
        """Whether the time for that has come."""
        return self.abort_after is not None and len(self.tokens) >= self.abort_after and not self.was_aborted

    def alone(self, request_id: str) -> Request:
        """The same request anew, with a salt of its own so that no cached page serves it."""
        old = self.request
        return Request(request_id, old.prompt_tokens, old.params, choice=old.choice, cache_salt=request_id)


class Traffic:
    """An endless draw of requests for one engine; the same seed draws the same ones, if they end the same."""

    def __init__(self, engine: Engine, longest: int, seed: int, texts: Sequence[str]) -> None:
        """longest: most tokens of a request. texts: what prompts are cut from, where there is a tokenizer."""
        self._rng = random.Random(seed)
        self._vocab, self._max_len = engine.worker.models.cfg.vocab_size, engine.max_model_len
        self._longest = longest
        self._corpus = _corpus(engine.tokenizer, texts)
        self._has_grammars = (
            engine.grammars is not None and importlib.util.find_spec("llguidance") is not None
        )
        self._has_text = engine.tokenizer is not None
        self._tail = LogNormal(longest / 10, 1.0, 1, longest // 2)
        self._answer = LogNormal(longest / 12, 0.8, 1, longest // 4)
        page = engine.pool.page_size
        self._families = [self._cut(min(page * (1 + index), longest // 3)) for index in range(FAMILIES)]
        self._ended: deque[list[int]] = deque(maxlen=32)
        self._count = 0

    def draw(self) -> list[Plan]:
        """The next requests: one, or several answers to one prompt."""
        rng = self._rng
        prompt, option = self._prompt(), self._option()
        params = self._params(option, min(self._answer.draw(rng), self._longest - len(prompt)))
        priority, salt = rng.choice((0, 0, 0, 0, -1, 1)), rng.choice((None, None, None, None, "tenant"))
        salt = f"{salt}-{rng.randrange(TENANTS)}" if salt else None
        answers = rng.randint(2, 4) if rng.random() < 0.1 else 1
        plans = []
        for choice in range(answers):
            request = Request(
                self._next_id(), list(prompt), params, choice=choice, priority=priority, cache_salt=salt
            )
            stop = rng.choice((0, rng.randrange(params.max_tokens + 1))) if rng.random() < 0.12 else None
            plans.append(Plan(request, option, stop))
        return plans

    def draw_longest(self) -> list[Plan]:
        """A request as long as any may be, to take most of the pool for a while."""
        prompt = self._cut(self._longest - self._longest // 8)
        params = self._params("greedy", self._longest - len(prompt))
        return [Plan(Request(self._next_id(), prompt, params), "longest")]

    def draw_growing(self) -> list[Plan]:
        """A short prompt with a long answer: of these more start than fit when they have grown."""
        params = replace(self._params("sampled", self._longest // 4), ignore_eos=True, stop=())
        return [Plan(Request(self._next_id(), self._cut(self._rng.randint(1, 24)), params), "growing")]

    def draw_refused(self) -> Request:
        """A request that cannot be served."""
        cases: tuple[Callable[[], list[int]], ...] = (
            list,
            lambda: [self._vocab],
            lambda: [-1],
            lambda: self._cut(3) * (self._max_len // 3 + 1),
        )
        return Request(self._next_id(), self._rng.choice(cases)(), SamplingParams(max_tokens=4))

    def ended(self, plan: Plan) -> None:
        """Note a request that ended by itself; later ones may go on from its answer."""
        if len(plan.request.prompt_tokens) + len(plan.tokens) < self._longest // 2:
            self._ended.append(plan.request.prompt_tokens + plan.tokens)

    def kinds(self) -> Iterator[SamplingParams]:
        """One of each combination for which steps are recorded, to warm up with."""
        for option in ("greedy", "sampled", "filters"):
            for logprobs in (None, 1):
                yield replace(self._params(option, 6), logprobs=logprobs, stop=(), ignore_eos=True)
        if self._has_grammars:
            for logprobs in (None, 1):
                yield replace(self._params("numbers", 6), logprobs=logprobs)

    def prompt(self, length: int) -> list[int]:
        """A prompt of its own."""
        return self._cut(length)

    def _next_id(self) -> str:
        self._count += 1
        return f"soak-{self._count}"

    def _prompt(self) -> list[int]:
        """Behind a shared prefix, as the next turn of a conversation, or new."""
        rng, prompt = self._rng, self._cut(self._tail.draw(self._rng))
        source = rng.random()
        if source < 0.4:
            prompt = rng.choice(self._families) + prompt
        elif source < 0.6 and self._ended:
            prompt = rng.choice(self._ended) + prompt
        return prompt[: self._longest - GRAMMAR_TOKENS]

    def _cut(self, length: int) -> list[int]:
        """Tokens from anywhere in the texts, or random ones."""
        if not self._corpus:
            return random_tokens(self._rng, length, self._vocab)
        start = self._rng.randrange(len(self._corpus))
        around = self._corpus[start:] + self._corpus * (1 + length // len(self._corpus))
        return around[:length]

    def _option(self) -> str:
        if self._has_grammars and self._rng.random() < 0.12:
            return self._rng.choice(tuple(GRAMMARS))
        return self._rng.choice(tuple(OPTIONS))

    def _params(self, option: str, max_tokens: int) -> SamplingParams:
        rng = self._rng
        seed, max_tokens = rng.randrange(2**31), max(1, max_tokens)
        if option in GRAMMARS:
            return SamplingParams(
                max_tokens=max(GRAMMAR_TOKENS, max_tokens),
                temperature=0.7,
                seed=seed,
                grammar=GRAMMARS[option],
            )
        options = {"temperature": 0.0, **OPTIONS[option]}
        if rng.random() < 0.3:
            options["ignore_eos"] = True
        if rng.random() < 0.1:
            options["min_tokens"] = max(1, max_tokens // 4)
        if self._has_text and rng.random() < 0.2:
            options["stop"] = ("\n\n", "###")
        return SamplingParams(max_tokens=max_tokens, seed=seed, **options)


def fits_grammar(plan: Plan) -> bool:
    """Whether a whole answer follows the rule that the request gave."""
    if plan.option == "numbers":
        return re.fullmatch(NUMBERS, plan.text) is not None
    return plan.option != "object" or set(json.loads(plan.text)) == {"ok", "n"}


def _corpus(tokenizer: Tokenizer | None, texts: Sequence[str]) -> list[int]:
    if tokenizer is None:
        return []
    return tokenizer.encode("\n".join(texts), add_special_tokens=False)
