"""Steps under way: what a launched step will bring to the host, and how to wait for it.

Both kinds leave their tokens in one tensor behind which a copy to pinned memory follows, so that launching
never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nextn.engine.graphs import HostCopy
from nextn.engine.phases import PhaseClock
from nextn.engine.request import SamplingParams, TokenLogprobs
from nextn.engine.scheduler import Chunk, Running
from nextn.engine.step import unpack_logprobs
from nextn.kernels.ref.sampling import MAX_LOGPROBS

PIPELINE_DEPTH = 2
"""Steps in flight where launching does not wait: one runs, one is queued behind it. A row's page table and
the table of positions have room for no more."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens that a step brought for each row.

    logprobs: one a token in rows that ask for them, none in others.
    """

    tokens: list[list[int]]
    logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Launched:
    """A decode step of `entries` under way: its result on its way to the host (see `step.pack`).

    drafted: draft tokens a row that it verifies. width: W, the most tokens that the step brings a row. began:
    when the host began to launch it, by `time.perf_counter`. Until `wait` each entry counts as W tokens ahead
    of what the host knows, and is due one.
    """

    entries: tuple[Running, ...]
    result: HostCopy
    drafted: int
    clock: PhaseClock
    width: int
    began: float

    @staticmethod
    def start(
        entries: tuple[Running, ...],
        result: Tensor,
        drafted: int,
        clock: PhaseClock,
        width: int,
        began: float,
    ) -> Launched:
        """Send the entries' rows, the first of a step's result, to the host, without waiting for it."""
        launched = Launched(entries, HostCopy.start(result[: len(entries)]), drafted, clock, width, began)
        for entry in entries:
            entry.ahead += width
            entry.due += 1
        return launched

    def wait(self) -> Emitted:
        """The step's tokens; waits until it has run. To be called once."""
        result = self.result.wait()
        for entry in self.entries:
            entry.ahead -= self.width
            entry.due -= 1
        return _read(result, self.width, [entry.request.params for entry in self.entries])


@dataclass(frozen=True, slots=True)
class LaunchedPrefill:
    """A prefill step of `chunks` under way.

    result: of the chunks that are last, in order, as of a plain decode step (see `step.pack`).
    scored: of each chunk, the positions whose next prompt token is rated; prompt_logprobs [P, 1 + 20] of all
    of them end to end, None where nobody asks.
    """

    chunks: tuple[Chunk, ...]
    result: HostCopy
    scored: tuple[range, ...]
    prompt_logprobs: HostCopy | None
    clock: PhaseClock
    began: float

    @staticmethod
    def start(
        chunks: Sequence[Chunk],
        result: Tensor,
        scored: tuple[range, ...],
        prompt_logprobs: Tensor | None,
        clock: PhaseClock,
        began: float,
    ) -> LaunchedPrefill:
        """Send a step's results to the host, without waiting for them; its rows are due a token."""
        rated = None if prompt_logprobs is None else HostCopy.start(prompt_logprobs)
        launched = LaunchedPrefill(tuple(chunks), HostCopy.start(result), scored, rated, clock, began)
        for entry in launched.entries:
            entry.due += 1
        return launched

    @property
    def entries(self) -> tuple[Running, ...]:
        """The rows that the step brings a token."""
        return tuple(chunk.entry for chunk in self.chunks if chunk.is_last)

    def wait(self) -> Emitted:
        """The first token of each chunk that `is_last`; waits until the step has run. To be called once.

        Log-probabilities of prompt tokens go to the requests that still run.
        """
        if self.prompt_logprobs is not None:
            self._keep_prompt_logprobs(self.prompt_logprobs.wait())
        result = self.result.wait()
        for entry in self.entries:
            entry.due -= 1
        return _read(result, 1, [entry.request.params for entry in self.entries])

    @property
    def seconds(self) -> float:
        """What the step took: between events on a GPU, by the clock on a CPU. After `wait`."""
        return sum(self.clock.milliseconds().values()) / 1e3

    def _keep_prompt_logprobs(self, packed: Tensor) -> None:
        parts = packed.split([len(places) for places in self.scored])
        for chunk, places, part in zip(self.chunks, self.scored, parts, strict=True):
            if places and chunk.entry.pages:
                request = chunk.entry.request
                tokens = request.prompt_tokens[places.start + 1 : places.stop + 1]
                request.prompt_logprobs = request.prompt_logprobs or [None]
                request.prompt_logprobs += token_logprobs(part, tokens, request.params.prompt_logprobs or 0)


def _read(result: Tensor, width: int, params: Sequence[SamplingParams]) -> Emitted:
    """A step's result on the host, [B, 1 + W] or with log-probabilities [B, 1 + W + 21 W]."""
    head, tail = result[:, : 1 + width], result[:, 1 + width :]
    tokens = [row[1 : 1 + row[0]] for row in head.tolist()]
    return Emitted(tokens, read_logprobs(tail, tokens, params))


def read_logprobs(
    packed: Tensor, tokens: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[tuple[TokenLogprobs, ...]]:
    """The log-probabilities of rows' emitted tokens, none in rows that do not ask.

    packed [B, 21 W] int64 on the host, of the rows of `tokens` and `params`; empty where no row asks.
    """
    found: list[tuple[TokenLogprobs, ...]] = []
    for row, (own, asked) in enumerate(zip(tokens, params, strict=True)):
        part = packed[row].view(-1, 1 + MAX_LOGPROBS)[: len(own)] if asked.logprobs is not None else None
        found.append(() if part is None else tuple(token_logprobs(part, own, asked.logprobs or 0)))
    return found


def token_logprobs(packed: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """packed [n, 1 + 20] int64 on the host, the n tokens, and how many alternatives to list at most."""
    values, ids = (each.tolist() for each in unpack_logprobs(packed))
    return [
        TokenLogprobs(
            token,
            own[0],
            tuple((i, v) for i, v in zip(names[1 : 1 + top], own[1 : 1 + top], strict=True) if v > -math.inf),
        )
        for token, own, names in zip(tokens, values, ids, strict=True)
    ]
